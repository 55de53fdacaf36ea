"""`MessagedReplica`: a replica behind a connection that carries messages, of any kind."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from batchwright.inference.calls import closing
from batchwright.inference.inference import Call, WorkUnderWay
from batchwright.inference.replicas.messages import (
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
    ToReplica,
    decoded_error,
    decoded_figures,
)
from batchwright.inference.replicas.replica import Replica, ReplicaDied, ReplicaFacts

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

PATIENCE = 300.0
"""Seconds without a sign of life, or with calls and without a step, after which a replica counts as dead."""
GRACE = 10.0
"""Seconds within which a replica must end after it was asked to."""
_Item = FromReplica | ReplicaDied


class Connection(Protocol):
    """A connection to one process that loads the model and computes. Once dead, it stays dead."""

    def send(self, message: ToReplica) -> None:
        """Send a message, in the order of the calls. Messages to a dead process are lost."""

    async def receive(self) -> FromReplica:
        """Return the next message. Raises `ConnectionError` if there will be no more."""

    def kill(self) -> None:
        """Kill the process."""

    async def end(self) -> ReplicaDied:
        """Wait until the process has ended, kill it if it does not end by itself, and return why it ended."""


class MessagedReplica(Replica):
    """A replica that has a new connection for each of its lives, made by `_connect`; killed if it shows no progress.

    Calls are leased to one life: their numbers are never reused, and a connection is not read any more once its life
    has been given up. So an answer sent after that, because only the network had failed, is ignored.
    """

    def __init__(self, *, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._connection: Connection | None = None
        self._stats: EngineStats | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Queue[_Item]] = {}
        """Queues of the calls that the replica has not answered to their end, by number."""
        self._is_up = False
        self._reason: str | None = None
        """Reason for its death that it reported, or for which it was killed."""

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    @property
    def is_up(self) -> bool:
        return self._is_up

    @abstractmethod
    async def _connect(self, progress: Callable[[str], None]) -> Connection:
        """Start a process that knows what to load, and return the connection to it.

        Raises `ReplicaDied` if it dies meanwhile.
        """

    async def start(self, progress: Callable[[str], None]) -> ReplicaFacts:
        self._stats, self._reason = None, None
        connection = self._connection = await self._connect(progress)
        self._dead: asyncio.Future[ReplicaDied] = asyncio.get_running_loop().create_future()
        try:
            while not isinstance(message := await connection.receive(), Ready):
                if isinstance(message, Loading):
                    progress(message.text)
                elif isinstance(message, Refused):
                    raise decoded_error(message.error)
        except ConnectionError:
            raise await connection.end() from None
        except BaseException:
            connection.kill()
            await connection.end()
            raise
        self._is_up, self._heard = True, time.monotonic()
        self._receiving = asyncio.create_task(self._receive(connection))
        return message.facts

    async def ended(self) -> ReplicaDied:
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
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """Kill the process."""
        if self._connection is not None:
            self._connection.kill()

    async def close(self) -> None:
        if self._is_up:
            with suppress(ConnectionError):
                self._send(Close())
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
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
                ended = _is_last(message)
                yield message
        finally:
            self._waiting.pop(number, None)
            if not ended and self._is_up:
                self._send(Cancel(number))

    def _enter(self) -> tuple[int, asyncio.Queue[_Item]]:
        if not self._is_up:
            raise ReplicaDied("it is not up")
        number, replies = next(self._numbers), asyncio.Queue[_Item]()
        self._waiting[number] = replies
        return number, replies

    async def _receive(self, connection: Connection) -> None:
        watching = asyncio.create_task(self._watch(connection))
        try:
            while True:
                message = await connection.receive()
                if self._shows_progress(message):
                    self._heard = time.monotonic()
                if isinstance(message, Beat):
                    self._stats = decoded_figures(message.figures)
                elif isinstance(message, Broken):
                    self._reason = message.reason
                elif isinstance(message, (Answered, Chunk, Raised, Found)) and message.id in self._waiting:
                    self._waiting[message.id].put_nowait(message)
                    if _is_last(message):
                        # Its reader may take its time: for the replica it is done.
                        del self._waiting[message.id]
        except ConnectionError:
            pass
        finally:
            watching.cancel()
            self._is_up = False
            death = await connection.end()
            if self._reason is not None:
                death = ReplicaDied(self._reason, by_node=death.by_node)
            for replies in self._waiting.values():
                replies.put_nowait(ReplicaDied(str(death), by_node=death.by_node))
            # Their readers may take their time, while a new process has nothing to compute.
            self._waiting.clear()
            self._dead.set_result(death)

    def _shows_progress(self, message: FromReplica) -> bool:
        """Return whether the engine goes on: while there are calls, a beat only shows that the process lives."""
        if not isinstance(message, Beat) or not self._waiting or self._stats is None:
            return True
        stats = decoded_figures(message.figures)
        return stats is None or stats.steps != self._stats.steps

    async def _watch(self, connection: Connection) -> None:
        while (left := self._heard + self._patience - time.monotonic()) > 0:  # noqa: ASYNC110 - time is awaited
            await asyncio.sleep(left)
        self._reason = f"it gave no sign of life, or computed nothing, for {self._patience:g} s"
        connection.kill()

    def _send(self, message: ToReplica) -> None:
        if self._connection is not None:
            self._connection.send(message)


def _is_last(message: FromReplica) -> bool:
    """Return whether nothing follows `message` for its call."""
    return isinstance(message, (Answered, Raised, Found)) or (isinstance(message, Chunk) and message.body is None)
