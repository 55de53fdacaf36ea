"""`Gathering`: lines that are not in a batch yet, in the drafts of their future batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from batchwright.inference.batches.held import HeldLine
from batchwright.submitting.drafts import BatchLimits, Draft, Drafts

_Kind: TypeAlias = tuple[str, str | None]
"""Endpoint and model."""

_TOKENS_PER_BYTE = 0.25
"""Approximate prompt tokens per byte of a line; limits are learned from what is accepted and refused, in the same
measure."""


class Gathering:
    """Lines in drafts, each of which is sealed when it is full or no more lines come.

    `patience`: see `Drafts`; `limits_of` returns the current limits of one batch of a model.
    """

    def __init__(self, patience: float, limits_of: Callable[[str | None], BatchLimits]) -> None:
        self._drafts = Drafts(patience)
        self._limits_of = limits_of
        self._lines: dict[Draft, list[HeldLine]] = {}
        self._full: list[Draft] = []
        """Drafts that must be sealed."""

    def __iter__(self) -> Iterator[HeldLine]:
        return iter([line for lines in self._lines.values() for line in lines])

    def __len__(self) -> int:
        """Number of lines."""
        return sum(map(len, self._lines.values()))

    @property
    def full(self) -> int:
        """Number of drafts that must be sealed."""
        return len(self._full)

    def add(self, line: HeldLine, now: float) -> bool:
        """Add a line. Returns whether there is a new draft, or one that must be sealed."""
        kind: _Kind = (line.call.endpoint, line.body.get("model"))
        draft, done = self._drafts.place(kind, line.size, line.size * _TOKENS_PER_BYTE, now, self._limits_of(kind[1]))
        is_new = draft not in self._lines
        self._lines.setdefault(draft, []).append(line)
        self._full += done
        return is_new or bool(done)

    def next_due(self) -> float:
        """Return when the next draft will be due if no line comes."""
        return self._drafts.next_due()

    def close_due(self, now: float) -> None:
        """Schedule the sealing of drafts to which no line has been added for long."""
        self._full += self._drafts.due(now)

    def next_full(self) -> tuple[Draft, list[HeldLine]] | None:
        """Remove and return the next draft to be sealed, with its lines; None if there is none."""
        if not self._full:
            return None
        draft = self._full.pop(0)
        return draft, self._lines.pop(draft)

    def put_back(self, draft: Draft, lines: list[HeldLine]) -> None:
        """Put back the lines of a draft that could not be sealed, so that they wait again."""
        self._lines[draft] = lines

    def let_go(self, now: float) -> list[HeldLine]:
        """Remove and return all lines."""
        self._full += self._drafts.due(now, more_may_come=False)
        lines = [line for draft in self._full for line in self._lines.pop(draft, [])]
        self._full.clear()
        return lines
