"""The search for the request that made a batch fail.

The idea: halves are tried until the culprit is alone, using what is already known. If the first half of a failed batch
succeeds, the second is known to hold the culprit, and is halved without being tried. If the first half fails, the
second is probably fine, and is tried next: it is the most that can be answered at once. So with one bad request among
n, n/2 are answered after one or two further batches and all after about 1.5 · log₂ n, where halving blindly takes 2 ·
log₂ n; and however many are bad, no request is tried more than 1 + log₂ n times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_MANY = 8
"""Number of requests left to try from which on each is no more likely to be bad than any other request."""


class Search(Generic[T]):
    """Search among the requests of one batch: try each `part()`, or `single()`, and report `succeeded()` or `failed()`.

    `error`: how the batch failed; None: it has not been computed yet, and may be fine.
    """

    def __init__(self, batch: Sequence[T], error: BaseException | None = None) -> None:
        self.error = error
        self._sets: list[tuple[list[T], bool]] = [(list(batch), error is not None)]
        """Sets to be tried, the last first, each with whether it is known to hold a culprit."""
        self._part: list[T] = []
        self._is_likely = False
        """Whether `_part` would be expected to fail, if the batch was computed before."""
        self._other: list[T] | None = None
        """Other half of the set that `_part` comes from, if that set is known to hold a culprit."""

    @property
    def was_suspected(self) -> bool:
        """Whether the part that is being tried is likely to fail, since few requests are left that may be to blame."""
        return self.error is not None and self._is_likely

    def left(self) -> list[T]:
        """Return the requests that are not settled, except the part that is being tried."""
        return [item for items, _ in self._sets for item in items] + (self._other or [])

    def part(self, wanted: Callable[[T], bool]) -> list[T]:
        """Return the requests to try together next, without those no longer wanted; if empty, the search is over."""
        items, blamed = self._next(wanted)
        # About a single request, nothing is known that its own batch did not show.
        middle = len(items) // 2 if blamed and len(items) > 1 else 0
        self._part, self._other = (items[:middle], items[middle:]) if middle else (items, None)
        self._is_likely = middle > 0 or len(items) < _MANY
        return self._part

    def single(self, wanted: Callable[[T], bool]) -> list[T]:
        """Do the same as `part` with one request, to show whether anything can be computed at all."""
        items, blamed = self._next(wanted)
        self._part, self._other = items[:1], None
        self._is_likely = len(items) < _MANY
        if rest := items[1:]:
            if blamed:
                self._other = rest
            else:
                self._sets.append((rest, False))
        return self._part

    def _next(self, wanted: Callable[[T], bool]) -> tuple[list[T], bool]:
        """Remove the next set that holds wanted requests; return these, and whether one of them is to blame."""
        while self._sets:
            items, blamed = self._sets.pop()
            if live := [item for item in items if wanted(item)]:
                # If some are gone, the culprit may have been among them.
                return live, blamed and len(live) == len(items)
        return [], False

    def succeeded(self) -> None:
        """Note that all requests of the part have been answered."""
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
