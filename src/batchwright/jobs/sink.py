"""The file or the stream that results are written to as they finish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from batchwright.clock import Clock

_SECONDS_BETWEEN_SYNCS = 1.0


class Sink:
    """Output that appends whole lines to a file descriptor. A context manager.

    Each line is written at once, so that it survives the death of this process; about once a second, and at the end,
    the lines in a file are also synced, so that they survive a power loss.
    """

    def __init__(self, descriptor: int, name: str, clock: Clock, *, owned: bool = False, durable: bool = False) -> None:
        """`owned`: whether it is closed with the sink; `durable`: whether it is a file. `name` is for errors."""
        self._name = name
        self._descriptor = descriptor
        self._clock = clock
        self._owned = owned
        self._durable = durable
        self._synced_at = clock.now()
        self.size: int | None = os.fstat(descriptor).st_size if durable else None
        """Bytes in the file so far; None for a stream."""

    @classmethod
    def append_to(cls, path: Path, size: int, clock: Clock) -> Self:
        """Continue after the first `size` bytes of `path`, which is created if it does not exist. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(descriptor, size)
        return cls(descriptor, str(path), clock, owned=True, durable=True)

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, such as for a full disk; half a line left then is removed on resume."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._name) from error
        if self.size is not None:
            self.size += len(line)
        now = self._clock.now()
        if self._durable and now - self._synced_at >= _SECONDS_BETWEEN_SYNCS:
            os.fsync(self._descriptor)
            self._synced_at = now

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes at a place in the file. Raises OSError, also for a stream."""
        return os.pread(self._descriptor, size, offset)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._durable:
                os.fsync(self._descriptor)
        finally:
            if self._owned:
                os.close(self._descriptor)
