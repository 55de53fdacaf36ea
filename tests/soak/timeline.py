"""Which fault was when, and what online requests may suffer from it. Times are those of `time.monotonic`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

ANSWERED = "answered"
"""The outcome of a request that got what it asked for. The others are a status, such as `"503"`, or:"""
REFUSED, BROKEN, TIMEOUT, ERROR_EVENT = "refused connection", "broken connection", "timeout", "error in the stream"


@dataclass
class Era:
    """One fault and its aftermath."""

    name: str
    allowed: frozenset[str]
    """Outcomes other than `ANSWERED` that are to be expected."""
    began: float
    ended: float = math.inf
    """When its cause was gone."""
    settled: float = math.inf
    """When the last of its effects must be gone."""


class Timeline:
    """The faults in their order; one has settled before the next begins."""

    def __init__(self, settling: float) -> None:
        """`settling`: seconds from the end of a fault in which its effects are allowed."""
        self._settling = settling
        self.eras: list[Era] = []

    def begin(self, name: str, allowed: Collection[str], at: float) -> None:
        """Raises `ValueError` while another fault has not settled."""
        if self.eras and self.eras[-1].settled > at:
            raise ValueError(f"{self.eras[-1].name} has not settled before {name}")
        self.eras.append(Era(name, frozenset(allowed), at))

    def end(self, at: float) -> None:
        era = self.eras[-1]
        era.ended, era.settled = at, at + self._settling

    def during(self, began: float, ended: float) -> list[Era]:
        """The faults that may have had an effect on what happened from `began` to `ended`."""
        return [era for era in self.eras if era.began <= ended and began <= era.settled]

    def calm(self, began: float, ended: float) -> bool:
        """Whether no fault may have had an effect then."""
        return not self.during(began, ended)

    def explains(self, outcome: str, began: float, ended: float) -> bool:
        """Whether a request of that time may have had this outcome."""
        return outcome == ANSWERED or any(outcome in era.allowed for era in self.during(began, ended))
