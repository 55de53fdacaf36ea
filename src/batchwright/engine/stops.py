"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on up to the stop string that is complete first, and holds back what may be the beginning of one.

    Of two that are complete at the same character the longer one counts. So the outcome does not depend on how the
    text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """`(text to pass on, whether a stop string was met)`. While not `armed`, nothing stops.

        A stop string that begins in text that was not armed, and ends in text that is, counts.
        """
        if not self._stops:
            return text, False
        known = len(self._held)
        self._held += text
        if armed:
            found = [(at + len(stop), at) for stop in self._stops if (at := self._find(stop, known)) >= 0]
            if found:
                passed, self._held = self._held[: min(found)[1]], ""
                return passed, True
        return self._release(max(self._overlap(stop) for stop in self._stops)), False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(0)

    def _find(self, stop: str, known: int) -> int:
        """Where the first `stop` begins that ends after the first `known` characters held; -1 for none."""
        return self._held.find(stop, max(0, known - len(stop) + 1))

    def _overlap(self, stop: str) -> int:
        """Length of the longest beginning of `stop` that the held text ends with."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed
