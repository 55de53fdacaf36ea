"""Drafts: guesses at a sequence's next tokens from its own past, so that one step can compute several of them.

A step of few rows costs as much as reading the weights, and further rows are free. So a decoding sequence may add its
likely next tokens: those that followed the last occurrence of its last few tokens (prompt lookup decoding). The model
computes the guesses as if they were known and chooses a token after each, so a wrong guess costs a row and changes
nothing: the tokens are those that it would have chosen one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (4, 2)
"""Numbers of tokens that must match, the stronger evidence first."""
_FIRST = 4
"""Number of guesses at a time, until it is known how good they are."""


class Drafter:
    """Draft maker for one sequence of tokens, which may only grow."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """Where the last occurrence of these tokens that is followed by a token ends."""
        self._indexed = 0
        self._length = _FIRST

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow `tokens`."""
        self._index(tokens)
        known = len(tokens)
        for size in _SIZES:
            at = self._after.get(tuple(tokens[known - size :])) if known > size else None
            if at is not None:
                drafts: list[int] = []
                for place in range(at, at + min(most, self._length)):
                    # In a repetition, the copied tokens may themselves be guesses.
                    drafts.append(tokens[place] if place < known else drafts[place - known])
                return drafts
        return []

    def settle(self, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of `drafted` guesses were right, to guess more or fewer next time."""
        self._length = 2 * max(drafted, self._length) if accepted == drafted else accepted + 1

    def _index(self, tokens: Sequence[int]) -> None:
        for size in _SIZES:
            for end in range(max(size, self._indexed), len(tokens)):
                self._after[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)
