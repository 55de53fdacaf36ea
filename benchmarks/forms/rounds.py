"""Rounds of answers with a schema, and of free text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TYPED: dict[str, Any] = {
    "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
    "rating": {"type": "number", "minimum": 0, "maximum": 5},
    "pages": {"type": "integer", "minimum": 1, "maximum": 3000},
    "in_print": {"type": "boolean"},
    "genre": {"enum": ["novel", "poetry", "drama", "essay", "biography"]},
    "language": {"enum": ["English", "French", "German", "Spanish"]},
}
_NAMES = [
    "title", "author", "year", "genre", "language", "rating", "pages", "publisher", "in_print", "country", "summary",
    "isbn",
]  # fmt: skip


def schema_of_a_book(number: int = 0) -> dict[str, Any]:
    """A schema of a dozen fields, different for each number."""
    longest = 40 + number
    return {
        "type": "object",
        "properties": {name: _TYPED.get(name, {"type": "string", "maxLength": longest}) for name in _NAMES},
        "required": _NAMES,
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class Round:
    """One job: all prompts at once."""

    seconds: float
    lines: int
    tokens: int
    valid: int | None
    """Answers that ended and satisfy the schema; None without a schema."""
    steps: int | None = None
    """This and the following: batchwright only."""
    forced: int = 0
    mask_seconds: float = 0.0

    def row(self, name: str) -> str:
        """A row of the table."""
        valid = "" if self.valid is None else f"{self.valid} of {self.lines}"
        cells = [f"{self.tokens / self.seconds:,.0f}", f"{self.lines / self.seconds:.2f}"]
        cells += [f"{self.tokens / self.lines:.0f}", valid]
        if self.steps is None:
            cells += [""] * 3
        else:
            cells += [str(self.steps), f"{self.forced / self.tokens:.0%}", f"{self.mask_seconds / self.seconds:.1%}"]
        return f"| {name} | {' | '.join(cells)} |"


def median(rounds: Sequence[Round]) -> Round:
    """Return the round with the median time."""
    middle = statistics.median_low(each.seconds for each in rounds)
    return next(each for each in rounds if each.seconds == middle)


def ratio(ours: Sequence[Round], theirs: Sequence[Round], *, of_tokens: bool = False) -> str:
    """Return lines/s, or tokens/s, of one over another: of the medians, and the least and greatest of the rounds."""

    def rate(each: Round) -> float:
        return (each.tokens if of_tokens else each.lines) / each.seconds

    pairs = [rate(a) / rate(b) for a, b in zip(ours, theirs, strict=True)]
    middle = statistics.median(map(rate, ours)) / statistics.median(map(rate, theirs))
    return f"{middle:.2f} ({min(pairs):.2f}..{max(pairs):.2f})"
