"""The sink of result lines, which writes each at once."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from batchwright.clock import Clock

_SECONDS_BETWEEN_SYNCS = 1.0


class Sink:
    """Appends whole lines to a file descriptor.

    A line is handed to the system in one call, so it survives the death of this process from then on; about once
    a second, and at the end, a file is also made to survive a loss of power.
    """

    def __init__(self, descriptor: int, name: str, clock: Clock, *, durable: bool) -> None:
        """`durable`: the descriptor is that of a file, and closed with the sink. `name` is for errors."""
        self._name = name
        self._descriptor = descriptor
        self._clock = clock
        self._durable = durable
        self._synced_at = clock.now()

    @classmethod
    def append_to(cls, path: Path, size: int, clock: Clock) -> Sink:
        """Go on after the first `size` bytes of `path`, which is made where it does not exist. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, size)
        return cls(descriptor, str(path), clock, durable=True)

    def write(self, line: bytes) -> None:
        """Write one line. Raises OSError, for example when the disk is full; half a line is repaired on resume."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error
        now = self._clock.now()
        if self._durable and now - self._synced_at >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(self._descriptor)
            self._synced_at = now

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._durable:
            try:
                os.fsync(self._descriptor)
            finally:
                os.close(self._descriptor)
