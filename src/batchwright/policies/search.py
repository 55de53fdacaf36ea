"""The search for the request that made a batch fail.

The idea: halves are tried until the culprit is alone, and what is known is used. When the first half of a failed batch
succeeds, the second is known to hold the culprit, and is halved without being tried. When the first half
fails, the second is probably fine, and is tried next: it is the most that can be answered at once. So with one bad
request among n, n/2 are answered after one or two further batches and all after about 1.5 · log₂ n, where halving
blindly takes 2 · log₂ n; and however many are bad, no request is tried more than 1 + log₂ n times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Search(Generic[T]):
    """Search among the requests of one failed batch: try each `part()`, and report `succeeded()` or `failed()`."""

    def __init__(self, batch: Sequence[T]) -> None:
        self._sets: list[tuple[list[T], bool]] = [(list(batch), True)]
        """Sets to be tried, the last first, each with whether it is known to hold a culprit."""
        self._part: list[T] = []
        self._other: list[T] | None = None
        """Other half of the set that `_part` comes from, if that set is known to hold a culprit."""

    def left(self) -> list[T]:
        """Return the requests that are not settled, without the part that is being tried."""
        return [item for items, _ in self._sets for item in items] + (self._other or [])

    def part(self, wanted: Callable[[T], bool]) -> list[T]:
        """Return the requests to try together next, without those no longer wanted; none: the search is over."""
        while self._sets:
            all_items, blamed = self._sets.pop()
            items = [item for item in all_items if wanted(item)]
            if not items:
                continue
            if blamed and 1 < len(items) == len(all_items):
                middle = len(items) // 2
                self._part, self._other = items[:middle], items[middle:]
            else:
                # Where some have gone, the culprit may have been among them.
                self._part, self._other = items, None
            return self._part
        return []

    def succeeded(self) -> None:
        """Note that all of the part have been answered."""
        if self._other is not None:
            self._sets.append((self._other, True))
        self._part, self._other = [], None

    def failed(self) -> None:
        """Note that the part failed: it will be halved, or is settled if it was a single request."""
        if len(self._part) > 1:
            self._sets.append((self._part, True))
        if self._other is not None:
            self._sets.append((self._other, False))
        self._part, self._other = [], None
