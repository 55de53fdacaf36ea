"""How much may be enqueued at a provider at once, found from what it accepts and refuses."""

from __future__ import annotations

import math
import re

_CLOSE = 0.9
"""Ratio of what was accepted to what was refused at or above which the limit counts as found."""
_SHARE_OF_NAMED = 0.9
"""Share of a limit named by the provider that one batch may have, since our count of tokens is an estimate."""
_REMEMBERED = 3600.0
"""Seconds after a refusal for which the limit counts as found."""
_NAMED_LIMIT = re.compile(r"limit(?::| of) *([\d,.]+) *([KMB]?)\b", re.IGNORECASE)
_UNITS = {"": 1, "K": 1_000, "M": 1_000_000, "B": 1_000_000_000}
_CODES = frozenset({"token_limit_exceeded", "enqueued_token_limit_exceeded", "request_limit_exceeded"})


class EnqueuedTokens:
    """The limit of tokens that a provider lets one customer enqueue, in our own estimate of tokens.

    More is enqueued until the provider refuses. The limit is then searched by halving between the most that it
    accepted and the least that it refused, one try for each batch that ends; an hour after the last refusal it is
    searched anew, since limits rise with what a customer has paid. A refusal costs nothing but time. All times are in
    seconds.
    """

    def __init__(self) -> None:
        self.taken = 0.0
        """Most tokens of ours that the provider accepted at once."""
        self.refused = math.inf
        """Fewest tokens that were too many."""
        self.closed_until = -math.inf
        """Time until which nothing is enqueued, since what fills the limit is not ours."""
        self._refused_at = -math.inf
        self._may_try = True

    def limit(self, now: float) -> float:
        """Return how many tokens may be enqueued now."""
        if self.refused == math.inf or now - self._refused_at >= _REMEMBERED:
            return math.inf
        if self.taken >= _CLOSE * self.refused or not self._may_try:
            return self.taken
        return (self.taken + self.refused) / 2

    def has_room(self, tokens: float, enqueued: float, now: float) -> bool:
        """Whether a batch of `tokens` may be submitted while `enqueued` tokens are at the provider.

        The first one always may: only its refusal can show that it is too large by itself.
        """
        if now < self.closed_until:
            return False
        return enqueued == 0 or enqueued + tokens <= self.limit(now)

    def most_of_one(self, now: float) -> float:
        """Return how many tokens one batch may have."""
        if self.refused == math.inf or now - self._refused_at >= _REMEMBERED:
            return math.inf
        return self.taken or self.refused / 2

    def took(self, enqueued: float, now: float) -> None:
        """Note that `enqueued` tokens are at the provider, the newest batch included, and are being computed."""
        self.taken = max(self.taken, enqueued)
        if self.taken >= self.refused:
            # The limit has risen, or the refusal was about what others of the same customer had enqueued.
            self.refused = math.inf

    def refuse(self, tokens: float, enqueued: float, now: float, named: float | None = None) -> None:
        """Note that a batch of `tokens` was refused while `enqueued` were there, by a limit of `named` tokens."""
        self.refused = min(self.refused, tokens + enqueued)
        # What was accepted once may be too much now.
        self.taken = min(self.taken, enqueued)
        if enqueued == 0 and named is not None:
            # If it is more than the batch has, what others of the same customer have enqueued is in the way.
            self.taken = min(tokens, _SHARE_OF_NAMED * named)
        self._refused_at = now
        self._may_try = False

    def ended(self) -> None:
        """Note that a batch ended, after which more may be tried again."""
        self._may_try = True


def is_enqueued_limit(code: object, message: object) -> bool:
    """Whether an error says that too much is enqueued, which passes when other batches end."""
    text = str(message or "").lower()
    return str(code) in _CODES or ("enqueued" in text and "limit" in text)


def named_limit(message: str) -> int | None:
    """Return the limit that the message of a refusal names, in tokens; None if it names none."""
    found = _NAMED_LIMIT.search(message)
    if found is None or not any(map(str.isdigit, found[1])):
        return None
    number = found[1].rstrip(".,").replace(",", "")
    return None if number.count(".") > 1 else int(float(number) * _UNITS[found[2].upper()])
