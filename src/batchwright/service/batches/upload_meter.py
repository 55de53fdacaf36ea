"""Limits on the size of an upload, measured as it arrives. HTTP bounds how slow it may be."""

from __future__ import annotations

from batchwright.errors import InvalidRequest
from batchwright.service.limits import ServiceLimits


class UploadMeter:
    """Measures an upload as it passes."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._bytes = 0
        self._newlines = 0
        self._open = 0
        """Number of bytes since the last newline."""
        self._returned = False
        """Whether the last of them is a carriage return, which may end the line and then does not count."""

    @property
    def lines(self) -> int:
        """Number of lines so far, blank ones counted."""
        return self._newlines + (self._open > 0)

    def take(self, chunk: bytes) -> None:
        """Count a piece of the upload. Raises `InvalidRequest` past a limit."""
        limits = self._limits
        self._bytes += len(chunk)
        if self._bytes > limits.max_file_bytes:
            raise _too_large(f"the file has more than {limits.max_file_bytes:,} bytes")
        # Only a chunk that is longer than what is left for the line that is open can hold one that is too long.
        if self._open + len(chunk) > limits.max_line_bytes:
            self._measure_lines(chunk)
        self._newlines += chunk.count(b"\n")
        last = chunk.rfind(b"\n")
        if self._newlines + (last + 1 < len(chunk)) > limits.max_lines:
            raise _too_large(f"the file has more than {limits.max_lines:,} lines")
        self._open = self._open + len(chunk) if last < 0 else len(chunk) - last - 1
        self._returned = chunk.endswith(b"\r") if chunk else self._returned

    def _measure_lines(self, chunk: bytes) -> None:
        before, returned = self._open, self._returned
        for number, line in enumerate(chunk.split(b"\n"), self._newlines + 1):
            returned = line.endswith(b"\r") if line else returned
            if before + len(line) - returned > self._limits.max_line_bytes:
                raise _too_large(f"line {number:,} has more than {self._limits.max_line_bytes:,} bytes")
            before, returned = 0, False


def _too_large(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what}: split it into several files, or raise the limit of the service", param="file", code="file_too_large"
    )
