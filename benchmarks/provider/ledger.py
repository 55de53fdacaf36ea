"""The provider's record of each request, and the figures counted from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

ANSWERED = "answered"
REFUSED = "refused"
UNDER_WAY = "under way"
ABANDONED = "abandoned"
"""The client had closed the connection before its answer was there. It is paid like any other."""


class Entry(msgspec.Struct):
    """One request. Times are seconds since the provider's first request."""

    line: int
    arrived: float
    key: str = ""
    """The API key with which it came."""
    ended: float | None = None
    status: int = 0
    """0 for a response without a head."""
    outcome: str = UNDER_WAY
    """`answered`, `refused`, `abandoned`, or the name of a fault."""
    limit: str | None = None
    """The name of the limit that refused it."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    nanodollars: int = 0
    paid: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the input and the output."""
        return self.input_tokens + self.output_tokens

    @property
    def answered(self) -> bool:
        """Whether the client was sent the whole, correct answer."""
        return self.outcome == ANSWERED


class Ledger(msgspec.Struct):
    """All requests, in the order of their arrival."""

    entries: list[Entry] = msgspec.field(default_factory=list)
    now: float = 0.0
    """The time at which this was read."""

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def refused(self) -> list[Entry]:
        """Requests that a limit refused."""
        return [entry for entry in self.entries if entry.outcome == REFUSED]

    @property
    def paid(self) -> list[Entry]:
        """Requests that were billed."""
        return [entry for entry in self.entries if entry.paid]

    @property
    def dollars(self) -> float:
        """The bill."""
        return sum(entry.nanodollars for entry in self.entries) / 1e9

    def outcomes(self) -> dict[str, int]:
        """Number of requests by their outcome."""
        return dict(Counter(entry.outcome for entry in self.entries))

    def paid_again(self) -> list[Entry]:
        """Payments for lines whose answer had already been sent to the client."""
        return [*_after_an_answer(entry for entry in self.entries if entry.paid)]

    def payments(self) -> dict[int, list[Entry]]:
        """By line, what was paid for it."""
        by_line: dict[int, list[Entry]] = {}
        for entry in self.paid:
            by_line.setdefault(entry.line, []).append(entry)
        return by_line


def _after_an_answer(paid: Iterable[Entry]) -> Iterator[Entry]:
    ended: dict[int, float] = {}
    for entry in paid:
        if entry.line in ended and entry.arrived >= ended[entry.line]:
            yield entry
        if entry.answered and entry.ended is not None:
            ended[entry.line] = min(entry.ended, ended.get(entry.line, entry.ended))


def answered_by(entries: Sequence[Entry]) -> dict[int, Entry]:
    """By line, the request that was answered first."""
    first: dict[int, Entry] = {}
    for entry in sorted((each for each in entries if each.answered), key=lambda each: each.ended or 0.0):
        first.setdefault(entry.line, entry)
    return first
