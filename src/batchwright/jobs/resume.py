"""What an output tells of the run that wrote it, and its lines in the order of the input."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from batchwright.durable_files import replacing
from batchwright.errors import ResumeRefused
from batchwright.lines.custom_ids import IdTable
from batchwright.lines.results import output_id


class _WrittenLine(msgspec.Struct):
    id: str
    custom_id: str
    response: msgspec.Raw
    """Passed over: its content does not matter here."""
    error: dict[str, Any] | None


class Finished:
    """Set of finished lines: one bit for each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.succeeded = 0
        self.failed = 0
        self.size = 0
        """Bytes of the output that are whole lines; half a line may follow."""

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def __len__(self) -> int:
        return self.succeeded + self.failed

    def add(self, number: int, *, failed: bool) -> None:
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits) // 2)))
        self._bits[byte] |= 1 << (number & 7)
        if failed:
            self.failed += 1
        else:
            self.succeeded += 1


def scan(path: Path, key: str, ids: IdTable) -> Finished:
    """Find the lines of the job `key` in `path`. Their ids are claimed in `ids`.

    Half a line at the end, which is what a killed run leaves, is left out. Raises `ResumeRefused` for anything else
    that the job did not write.
    """
    finished = Finished()
    for position, (number, line, size) in enumerate(_written(path, key), start=1):
        # A second claim of an id, by whatever line, is not something that a run writes.
        if number in finished or ids.claim(line.custom_id, number) is not None:
            raise _foreign(path, position)
        finished.add(number, failed=line.error is not None)
        finished.size += size
    return finished


def _written(path: Path, key: str) -> Iterator[tuple[int, _WrittenLine, int]]:
    """Yield `(number, line, size in bytes)` of each whole line of `path`."""
    decoder = msgspec.json.Decoder(_WrittenLine)
    prefix = output_id(key, 0)[:-1]
    with path.open("rb") as file:
        for position, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, ValueError):
                raise _foreign(path, position) from None
            number = line.id.removeprefix(prefix)
            if not line.id.startswith(prefix) or not number.isascii() or not number.isdigit():
                raise _foreign(path, position)
            yield int(number), line, len(raw)


def _foreign(path: Path, position: int) -> ResumeRefused:
    return ResumeRefused(
        f"{path}, line {position}, was not written by this job: the file was changed since. "
        "Restore it, or start over with --overwrite"
    )


def write_in_order(unordered: Path, ordered: Path, key: str) -> None:
    """Write the lines of `unordered` into `ordered` by line number: to a file beside it, then renamed over it.

    Holds 8 bytes for each line. Raises OSError.
    """
    offsets = _offsets(unordered, key)
    with unordered.open("rb") as source, replacing(ordered) as target:
        for offset in offsets:
            if offset:
                source.seek(offset - 1)
                target.write(source.readline())


def _offsets(path: Path, key: str) -> array[int]:
    """Return for each line number where its line begins in `path`, plus one; 0 where there is none."""
    offsets = array("q")
    position = 0
    for number, _, size in _written(path, key):
        if number >= len(offsets):
            offsets.extend(bytes(max(number + 1 - len(offsets), len(offsets) // 2)))
        offsets[number] = position + 1
        position += size
    return offsets
