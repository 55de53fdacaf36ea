"""Files split into lines of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

_BOM = b"\xef\xbb\xbf"
_PIECE = 2**20
"""Bytes of a line that is too long that are read, and forgotten, at a time."""


def split_lines(file: IO[bytes], limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield number (from 1), offset in bytes, and content of each line of `file`, which is read from its beginning.

    The content is without the end of the line, and without a byte order mark at the start of the file, which the offset
    counts nevertheless. It is None for a line of more than `limit` bytes, which is never held whole.
    """
    # Room for a byte order mark and both bytes of a line end: what fills it without ending is over the limit.
    room = limit + len(_BOM) + 2
    number = offset = 0
    while read := file.readline(room):
        number += 1
        start = offset
        offset += len(read)
        whole = len(read) < room or read.endswith(b"\n")
        if number == 1 and read.startswith(_BOM):
            read, start = read[len(_BOM) :], len(_BOM)
        content = read.rstrip(b"\r\n")
        yield number, start, content if whole and len(content) <= limit else None
        while not whole:
            read = file.readline(_PIECE)
            offset += len(read)
            whole = not read or read.endswith(b"\n")
