"""`ProcessReplica`: a replica that is a process of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from batchwright.cgroups import threads_for
from batchwright.inference.replicas.cores import Place
from batchwright.inference.replicas.messaged_replica import GRACE, PATIENCE, Connection, MessagedReplica
from batchwright.inference.replicas.messages import (
    HEADER_BYTES,
    FromReplica,
    ReplicaSpec,
    ToReplica,
    decode_from_replica,
    frame,
    length_of,
)
from batchwright.inference.replicas.replica import ReplicaDied

_MODULE = "batchwright.inference.replicas.replica_main"


class ProcessReplica(MessagedReplica):
    """A process that computes at `place`, started by `start` and killed if it gives no sign of life."""

    def __init__(self, spec: ReplicaSpec, place: Place, *, patience: float = PATIENCE) -> None:
        super().__init__(patience=patience)
        threads = threads_for(len(place.cores), spec.count) or None
        self._spec = msgspec.structs.replace(spec, cpus=place.cpus, threads=threads)
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the first start."""
        return None if self._process is None else self._process.pid

    async def _connect(self, progress: Callable[[str], None]) -> Connection:
        ours, theirs = socket.socketpair()
        environment = os.environ | ({} if self._place.gpu is None else {"CUDA_VISIBLE_DEVICES": self._place.gpu})
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - takes milliseconds
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *([] if self._spec.weights is None else [self._spec.weights])],
                env=environment,
                process_group=0,
            )
        connection = _ProcessConnection(self._process, *await asyncio.open_connection(sock=ours))
        connection.send(self._spec)
        return connection


class _ProcessConnection(Connection):
    """A socket to a process of this machine."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    def send(self, message: ToReplica) -> None:
        self._writer.write(frame(message))

    async def receive(self) -> FromReplica:
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            message: FromReplica = decode_from_replica(await self._reader.readexactly(length_of(header)))
        except asyncio.IncompleteReadError:
            raise ConnectionError("the process closed its socket") from None
        return message

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def end(self) -> ReplicaDied:
        self._writer.close()
        try:
            status = await asyncio.to_thread(self._process.wait, GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            status = await asyncio.to_thread(self._process.wait)
        killed = status < 0
        return ReplicaDied(
            f"it was ended by {signal.Signals(-status).name}" if killed else f"it ended with status {status}"
        )


def _has_descriptor(stream: Any) -> bool:
    try:
        return isinstance(stream.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False
