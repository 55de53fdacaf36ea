"""Bounds on the shape of a JSON text, checked while it arrives, before it is parsed.

Parsing turns each byte into up to seventy bytes of memory, and into work for the garbage collector: fifteen megabytes
of `[],` become five million lists. So the values of a text are counted, piece by piece, without creating any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchwright.errors import InvalidRequest

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects."""
MAX_CONTAINERS = 32_768
"""Most arrays and objects."""
MAX_FIELDS = 65_536
"""Most members of all objects together. Each takes as long to parse as ten numbers."""
MAX_VALUES = 524_288
"""Most values of any kind: as many as the token ids of 2,048 texts of 256 tokens."""

_PIECE = 65_536
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Numbers of values in a JSON text, or in its beginning."""

    values: int = 1
    """Number of values of any kind. Each empty array or object counts twice."""
    containers: int = 0
    fields: int = 0
    depth: int = 0
    """Nesting depth of the deepest value."""


class JsonScan:
    """Scans a JSON text as it arrives, cut anywhere, and refuses it as soon as it has too much of anything.

    It does not check whether the text is JSON: parsing does.
    """

    def __init__(self) -> None:
        self.shape = JsonShape()
        """Shape of the text so far."""
        self._in_string = False
        self._escape = False
        """Whether the last piece ended with a backslash that escapes the first character of the next."""
        self._depth = 0

    def feed(self, text: bytes) -> None:
        """Scan the next part of the text.

        Raises `InvalidRequest` (code `json_too_complex`) when the text now has too many values, containers or fields,
        or is nested too deeply.
        """
        for start in range(0, len(text), _PIECE):
            self._scan(text[start : start + _PIECE])
            for count, most, what in (
                (self.shape.values, MAX_VALUES, "values"),
                (self.shape.containers, MAX_CONTAINERS, "arrays and objects"),
                (self.shape.fields, MAX_FIELDS, "fields of objects"),
                (self.shape.depth, MAX_DEPTH, "levels of nested arrays and objects"),
            ):
                if count > most:
                    raise InvalidRequest(f"the body has more than {most:,} {what}: send less", code="json_too_complex")

    def _scan(self, piece: bytes) -> None:
        if self._escape:
            piece = piece[1:]
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._escape = backslashes % 2 == 1
        if b"\\" in piece:
            # From the left, so that in a run of backslashes each one is taken together with what it escapes.
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        if not outside:
            return
        depths = np.cumsum(_STEP[np.frombuffer(outside, np.uint8)], dtype=np.int32)
        opened = outside.count(b"[") + outside.count(b"{")
        self.shape = JsonShape(
            values=self.shape.values + opened + outside.count(b","),
            containers=self.shape.containers + opened,
            fields=self.shape.fields + outside.count(b":"),
            depth=max(self.shape.depth, self._depth + int(depths.max())),
        )
        self._depth += int(depths[-1])
