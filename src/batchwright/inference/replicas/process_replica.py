"""`ProcessReplica`: a replica that is a process of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from batchwright.inference.calls import closing
from batchwright.inference.inference import Call, WorkUnderWay
from batchwright.inference.replicas.cores import Place
from batchwright.inference.replicas.messages import (
    HEADER_BYTES,
    Answered,
    Ask,
    Beat,
    Broken,
    Cancel,
    Chunk,
    Close,
    Found,
    FromReplica,
    Loading,
    Look,
    Raised,
    Ready,
    Refused,
    ReplicaSpec,
    ToReplica,
    decode_from_replica,
    decoded_error,
    decoded_figures,
    frame,
    length_of,
)
from batchwright.inference.replicas.replica import Replica, ReplicaDied, ReplicaFacts

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

PATIENCE = 300.0
"""Seconds without a sign of life, or with calls and without a step, after which a replica counts as dead."""
_MODULE = "batchwright.inference.replicas.replica_main"
_GRACE = 10.0
"""Seconds in which a process has to end once it was told to."""
_Item = FromReplica | ReplicaDied


class ProcessReplica(Replica):
    """A process that computes at `place`, started by `start` and killed if it gives no sign of life."""

    def __init__(self, spec: ReplicaSpec, place: Place, *, patience: float = PATIENCE) -> None:
        self._spec = msgspec.structs.replace(spec, cpus=place.cpus, threads=len(place.cores) or None)
        self._place = place
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._stats: EngineStats | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Queue[_Item]] = {}
        self._is_up = False
        self._told: str | None = None
        """Reason for its death that it gave itself, or for which it was killed."""

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def pid(self) -> int | None:
        """Process id; None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self, progress: Callable[[str], None]) -> ReplicaFacts:
        ours, theirs = socket.socketpair()
        environment = os.environ | ({} if self._place.gpu is None else {"CUDA_VISIBLE_DEVICES": self._place.gpu})
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - takes milliseconds
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                process_group=0,
            )
        self._stats, self._told = None, None
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            self._send(self._spec)
            while True:
                message = await self._next()
                if isinstance(message, Loading):
                    progress(message.text)
                elif isinstance(message, Refused):
                    raise decoded_error(message.error)
                elif isinstance(message, Ready):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ReplicaDied(await self._end()) from None
        except BaseException:
            self.kill()
            await self._end()
            raise
        self._is_up, self._heard = True, time.monotonic()
        self._receiving = asyncio.create_task(self._receive())
        return message.facts

    async def ended(self) -> str:
        return await asyncio.shield(self._dead)

    async def answer(self, call: Call) -> dict[str, Any]:
        async with closing(self._replies(call, stream=False)) as messages:
            async for message in messages:
                if isinstance(message, Answered):
                    return message.body
        raise ReplicaDied("it gave no answer")

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        async with closing(self._replies(call, stream=True)) as messages:
            async for message in messages:
                if isinstance(message, Chunk) and message.body is not None:
                    yield message.body

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        number, replies = self._enter()
        try:
            self._send(Look(number, prefix))
            message = await replies.get()
            if isinstance(message, ReplicaDied):
                raise message
            return message.work if isinstance(message, Found) else None
        finally:
            del self._waiting[number]

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        if self._is_up:
            with suppress(ConnectionError):
                self._send(Close())
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await self.ended()
        self.kill()
        if self._is_up:
            await self.ended()

    async def _replies(self, call: Call, *, stream: bool) -> AsyncIterator[FromReplica]:
        number, replies = self._enter()
        ended = False
        try:
            self._send(Ask.of(number, call, stream=stream))
            while not ended:
                message = await replies.get()
                if isinstance(message, ReplicaDied):
                    ended = True
                    raise message
                if isinstance(message, Raised):
                    ended = True
                    raise decoded_error(message.error)
                ended = isinstance(message, Answered) or (isinstance(message, Chunk) and message.body is None)
                yield message
        finally:
            del self._waiting[number]
            if not ended and self._is_up:
                self._send(Cancel(number))

    def _enter(self) -> tuple[int, asyncio.Queue[_Item]]:
        if not self._is_up:
            raise ReplicaDied("it is not up")
        number, replies = next(self._numbers), asyncio.Queue[_Item]()
        self._waiting[number] = replies
        return number, replies

    async def _receive(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                message = await self._next()
                if self._shows_progress(message):
                    self._heard = time.monotonic()
                if isinstance(message, Beat):
                    self._stats = decoded_figures(message.figures)
                elif isinstance(message, Broken):
                    self._told = message.reason
                elif isinstance(message, (Answered, Chunk, Raised, Found)) and message.id in self._waiting:
                    self._waiting[message.id].put_nowait(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            watching.cancel()
            self._is_up = False
            reason = await self._end()
            for replies in self._waiting.values():
                replies.put_nowait(ReplicaDied(reason))
            self._dead.set_result(reason)

    def _shows_progress(self, message: FromReplica) -> bool:
        """Return whether the engine goes on: while there are calls, a beat alone only shows that the process does."""
        if not isinstance(message, Beat) or not self._waiting or self._stats is None:
            return True
        told = decoded_figures(message.figures)
        return told is None or told.steps != self._stats.steps

    async def _watch(self) -> None:
        while (left := self._heard + self._patience - time.monotonic()) > 0:  # noqa: ASYNC110 - time is awaited
            await asyncio.sleep(left)
        self._told = f"it gave no sign of life, or computed nothing, for {self._patience:g} s"
        self.kill()

    async def _next(self) -> FromReplica:
        header = await self._reader.readexactly(HEADER_BYTES)
        message: FromReplica = decode_from_replica(await self._reader.readexactly(length_of(header)))
        return message

    async def _end(self) -> str:
        """Wait for the end of the process, and return its reason."""
        assert self._process is not None
        self._writer.close()
        process = self._process
        try:
            status = await asyncio.to_thread(process.wait, _GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            status = await asyncio.to_thread(process.wait)
        if self._told is not None:
            return self._told
        return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"

    def _send(self, message: ToReplica) -> None:
        self._writer.write(frame(message))


def _has_descriptor(stream: Any) -> bool:
    try:
        return isinstance(stream.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False
