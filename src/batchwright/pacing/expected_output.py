"""`ExpectedOutput`: how many tokens an answer will have, from those that this job has seen."""

from __future__ import annotations

_FIRST_GUESS = 256.0
_MEMORY = 200


class ExpectedOutput:
    """Mean length of answers, faded, and never above the limit of the request itself."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0.0

    def of(self, limit: int | None) -> float:
        """Return the expected tokens of an answer that may have `limit` tokens; None: as many as it likes."""
        mean = self._sum / self._count if self._count else _FIRST_GUESS
        return mean if limit is None else min(mean, float(limit))

    def learn(self, tokens: int) -> None:
        """Learn the length of an answer."""
        keep = 1.0 - 1.0 / _MEMORY
        self._sum = self._sum * keep + tokens
        self._count = self._count * keep + 1.0
