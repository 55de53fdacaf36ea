"""`Provider`: decides what happens to each request, with the time as an argument. `server.py` carries it out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.provider.amounts import Usage
from benchmarks.provider.answers import CHARACTERS_PER_TOKEN, Fate, Law, Prices, PromptCache, tokens_of
from benchmarks.provider.ledger import ABANDONED, ANSWERED, REFUSED, Entry, Ledger
from benchmarks.provider.limits import Limits, Refusal

_LINE = re.compile(r"\[line (\d+)\]")
_WORDS = "The quick brown fox jumps over the lazy dog, and then it rests a while. "


@dataclass(frozen=True, slots=True)
class Ticket:
    """An admitted request."""

    entry: Entry
    fate: Fate
    prompt: str
    estimate: Usage
    """What counts for it on arrival."""
    actual: Usage
    """What it takes if it is computed."""

    @property
    def content(self) -> str:
        """The answer's text."""
        characters = self.fate.output_tokens * CHARACTERS_PER_TOKEN
        return (_WORDS * (characters // len(_WORDS) + 1))[:characters]


class Provider:
    """Limits, answers, the cache and the ledger."""

    def __init__(self, limits: Limits, law: Law | None = None, prices: Prices | None = None) -> None:
        self.limits = limits
        self.ledger = Ledger()
        self._law = law or Law()
        self._prices = prices or Prices()
        self._cache = PromptCache()
        self._attempts: dict[int, int] = {}

    def arrive(self, now: float, prompt: str, max_tokens: int, key: str = "") -> Ticket | Refusal:
        """Admit a request, or refuse it. An admitted one must be given to `leave` after the seconds of its fate."""
        numbers = _LINE.findall(prompt)
        line = int(numbers[-1]) if numbers else -1
        entry = Entry(line, now, key)
        self.ledger.entries.append(entry)
        estimate = Usage(1, tokens_of(prompt), max_tokens)
        refusal = self.limits.admit(now, estimate)
        if refusal is not None:
            entry.ended, entry.outcome = now, REFUSED
            entry.status, entry.limit = refusal.status, refusal.limit
            return refusal
        attempt = self._attempts.get(line, 0)
        self._attempts[line] = attempt + 1
        fate = self._law.draw(line, attempt, max_tokens)
        cached = self._cache.cached_tokens(now, prompt) if fate.billed else 0
        actual = Usage(1, estimate.input_tokens, fate.output_tokens, cached) if fate.billed else Usage(1)
        return Ticket(entry, fate, prompt, estimate, actual)

    def leave(self, now: float, ticket: Ticket, status: int, *, reached: bool = True) -> None:
        """Book the end of an admitted request; `reached`: whether its client was still there."""
        entry, fate = ticket.entry, ticket.fate
        self.limits.settle(now, ticket.estimate, ticket.actual)
        entry.ended, entry.status = now, status
        if not reached:
            entry.outcome = ABANDONED
        elif fate.answered:
            entry.outcome = ANSWERED
        else:
            entry.outcome = str(fate.fault)
        if fate.billed:
            self._cache.add(now, ticket.prompt)
            entry.paid = True
            entry.input_tokens, entry.output_tokens = ticket.actual.input_tokens, ticket.actual.output_tokens
            entry.cached_tokens = ticket.actual.cached_tokens
            entry.nanodollars = self._prices.nanodollars(ticket.actual)
