"""How lines are split into batches, and when a batch that is not full is submitted."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most that a provider accepts in one batch."""

    lines: int = 50_000
    size: int = 200_000_000
    """Bytes of the input file."""
    tokens: float = math.inf
    """Tokens of prompts."""


@dataclass(slots=True, eq=False)
class Draft:
    """A batch that is being gathered."""

    kind: Hashable
    """What all its lines have in common, such as endpoint and model: a provider wants one of each in a batch."""
    lines: int = 0
    size: int = 0
    tokens: float = 0.0
    last_at: float = -math.inf
    """Time of the last line."""

    def add(self, size: int, tokens: float, now: float) -> None:
        """Count a line."""
        self.lines += 1
        self.size += size
        self.tokens += tokens
        self.last_at = now


@dataclass
class Drafts:
    """The batches that are being gathered, one for each kind of line.

    `patience`: seconds without a new line after which a batch is submitted as it is; `most`: most kinds at once.
    """

    patience: float
    most: int = 16
    _open: dict[Hashable, Draft] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def lines(self) -> int:
        """Number of lines gathered."""
        return sum(draft.lines for draft in self._open.values())

    def place(
        self, kind: Hashable, size: int, tokens: float, now: float, limits: BatchLimits
    ) -> tuple[Draft, list[Draft]]:
        """Add a line of `size` bytes to a draft; return that draft, and those that are done because of the line.

        A line that exceeds a limit by itself gets a batch of its own.
        """
        done = []
        draft = self._open.get(kind)
        if draft is not None and not _fits(draft, size, tokens, limits):
            done.append(self._open.pop(kind))
            draft = None
        if draft is None:
            if len(self._open) >= self.most:
                oldest = min(self._open.values(), key=lambda each: each.last_at)
                done.append(self._open.pop(oldest.kind))
            draft = self._open[kind] = Draft(kind)
        draft.add(size, tokens, now)
        if draft.lines >= limits.lines:
            # A full batch need not wait for the line that would show that it is full.
            done.append(self._open.pop(kind))
        return draft, done

    def due(self, now: float, *, more_may_come: bool = True) -> list[Draft]:
        """Remove and return the drafts without a new line for `patience` seconds, or all if nothing more can come."""
        # By the sum, as in `next_due`: the difference may be rounded to less than `patience` at that very time.
        due = [each for each in self._open.values() if not more_may_come or each.last_at + self.patience <= now]
        for draft in due:
            del self._open[draft.kind]
        return due

    def next_due(self) -> float:
        """Return when the next draft will be due if nothing comes."""
        return min((each.last_at + self.patience for each in self._open.values()), default=math.inf)


def _fits(draft: Draft, size: int, tokens: float, limits: BatchLimits) -> bool:
    return draft.lines < limits.lines and draft.size + size <= limits.size and draft.tokens + tokens <= limits.tokens
