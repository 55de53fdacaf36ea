"""Finding the request that is to blame for a batch that failed.

The idea: halves are tried until the one to blame is alone, and what is known is used. When the first half of a batch
that failed is fine, the second is known to hold the one to blame, and is halved without being tried. When the first
half fails, the second is probably fine, and is tried next: it is the most that can be answered at once. So with one bad
request among n, n/2 are answered after one or two further batches and all after about 1.5 · log₂ n, where halving
blindly takes 2 · log₂ n; and however many are bad, no request is tried more than 1 + log₂ n times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Search(Generic[T]):
    """The requests of one failed batch. Take `part()`, try it, say `succeeded()` or `failed()`, and so on."""

    def __init__(self, batch: Sequence[T]) -> None:
        self._sets: list[tuple[list[T], bool]] = [(list(batch), True)]
        """To be tried, the last first, and whether one to blame is known to be among them."""
        self._part: list[T] = []
        self._other: list[T] | None = None
        """The other half, where the part is one of two that hold one to blame."""

    def left(self) -> list[T]:
        """Those of which nothing is settled, but for the part that is being tried."""
        return [item for items, _ in self._sets for item in items] + (self._other or [])

    def part(self, wanted: Callable[[T], bool]) -> list[T]:
        """The next to try together, of those that are still wanted; none: the search is over."""
        while self._sets:
            all_items, blamed = self._sets.pop()
            items = [item for item in all_items if wanted(item)]
            if not items:
                continue
            if blamed and 1 < len(items) == len(all_items):
                middle = len(items) // 2
                self._part, self._other = items[:middle], items[middle:]
            else:
                # Where some have gone, the one to blame may have been among them.
                self._part, self._other = items, None
            return self._part
        return []

    def succeeded(self) -> None:
        """All of the part have their answers."""
        if self._other is not None:
            self._sets.append((self._other, True))
        self._part, self._other = [], None

    def failed(self) -> None:
        """The part failed: it is to be halved, or where it was a single request, settled."""
        if len(self._part) > 1:
            self._sets.append((self._part, True))
        if self._other is not None:
            self._sets.append((self._other, False))
        self._part, self._other = [], None
