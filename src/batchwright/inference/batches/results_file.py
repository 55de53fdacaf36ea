"""Files of lines on disk: the custom ids of an input, and the results of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from batchwright.inference.batches.provider import LineResult


class _Identified(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(_Identified).decode


def custom_ids(path: Path) -> Iterator[str]:
    """Yield the custom id of each line of an input file. Raises OSError."""
    with path.open("rb") as file:
        for line in file:
            yield _decode(line).custom_id


def results_in(path: Path, parse: Callable[[bytes], LineResult | None]) -> Iterator[tuple[LineResult, int, int]]:
    """Yield each result in a file, with its offset and its bytes. Raises OSError."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if (result := parse(line)) is not None:
                yield result, offset, len(line)
            offset += len(line)


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Return a part of a file. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)
