"""`RankProcess`: another rank, as rank 0 sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from batchwright.engine.tensor_parallel.messages import Allocated, Failed, FromRank, Joined, Load, Loaded, ToRank
from batchwright.errors import EngineClosed

_MODULE = "batchwright.engine.tensor_parallel.rank_main"
_GRACE = 10.0
"""Seconds within which a process must end once its connection to rank 0 is closed."""


class RankProcess:
    """A process, started immediately, that carries out `order`; `when_lost` is called from a thread when it ends."""

    def __init__(self, order: Load, threads: int | None, when_lost: Callable[[], object]) -> None:
        self._name = f"rank {order.rank} of {order.ranks}"
        self._when_lost = when_lost
        self._replies: SimpleQueue[Loaded | Allocated | Joined | None] = SimpleQueue()
        self._failure: Failed | None = None
        self.lost: str | None = None
        """Why it ended; None while it lives."""
        ours, theirs = socket.socketpair()
        environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                process_group=0,
            )
        self._socket = ours
        self._connection: Connection[ToRank, FromRank] = Connection(os.dup(ours.fileno()))
        self._watching = threading.Thread(target=self._watch, name=f"batchwright-{self._name}", daemon=True)
        self._watching.start()
        self.send(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_cause(self) -> bool:
        """Whether it ended for a reason of its own, rather than because another rank did."""
        return self.lost is not None and (self._failure is None or self._failure.is_own)

    def send(self, message: ToRank) -> None:
        """Send `message`. Raises `EngineClosed` with the reason if the process has ended."""
        try:
            self._connection.send(message)
        except OSError:
            self._watching.join()
            raise EngineClosed(self.lost or f"{self._name} ended") from None

    def loaded(self) -> Loaded:
        """Wait until it has loaded its part of the model. Raises `EngineClosed` with the reason if it ends before."""
        reply = self._reply()
        assert isinstance(reply, Loaded)
        return reply

    def allocated(self) -> None:
        """Wait until it has its part of the KV cache. Raises the errors of `loaded`."""
        reply = self._reply()
        assert isinstance(reply, Allocated)

    def joined(self) -> None:
        """Wait until it has found the other ranks. Raises the errors of `loaded`."""
        reply = self._reply()
        assert isinstance(reply, Joined)

    def close(self) -> None:
        """End the process, whatever it is doing. May be called repeatedly."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._watching.join()
        self._socket.close()
        self._connection.close()

    def _reply(self) -> Loaded | Allocated | Joined:
        reply = self._replies.get()
        if reply is None:
            self._replies.put(None)
            raise EngineClosed(self.lost or f"{self._name} ended")
        return reply

    def _watch(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Failed):
                    self._failure = message
                else:
                    self._replies.put(message)
        except (EOFError, OSError):
            pass
        try:
            status = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._failure is not None:
            how = self._failure.reason if self._failure.is_own else f"it lost another rank ({self._failure.reason})"
            self.lost = f"{self._name} failed: {how}"
        elif status < 0:
            self.lost = f"{self._name} was ended by {signal.Signals(-status).name}"
        else:
            self.lost = f"{self._name} ended with status {status}"
        self._replies.put(None)
        self._when_lost()
