"""What limits count, how much of it a request takes, and values that change with time."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Quantity(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    """Tokens of the input and of the output together."""
    INPUT_TOKENS = "input_tokens"
    """Input tokens, without those read from the provider's cache."""
    OUTPUT_TOKENS = "output_tokens"


class Charge(StrEnum):
    """When a request counts, and with what amount."""

    ESTIMATE = "estimate"
    """On arrival, with what it may take; actual use changes nothing (OpenAI, Azure)."""
    ADJUSTED = "adjusted"
    """On arrival, with what it may take, and at its end the difference is booked (Anthropic's input tokens)."""
    ACTUAL = "actual"
    """At its end, with what it took; a request is refused only while nothing is left (Anthropic's output tokens)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request takes, or may take."""

    requests: int = 1
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens that the provider's cache held."""

    def amount(self, quantity: Quantity) -> float:
        """How much of a quantity this is."""
        match quantity:
            case Quantity.REQUESTS:
                return self.requests
            case Quantity.TOKENS:
                return self.input_tokens + self.output_tokens
            case Quantity.INPUT_TOKENS:
                return self.input_tokens - self.cached_tokens
            case Quantity.OUTPUT_TOKENS:
                return self.output_tokens


class Schedule:
    """A value that changes at given times and is constant in between."""

    def __init__(self, value: float, *changes: tuple[float, float]) -> None:
        """`changes` are pairs of a time and the value from then on, in order of time."""
        self._times = [0.0, *(time for time, _ in changes)]
        self._values = [value, *(value for _, value in changes)]
        if self._times != sorted(self._times) or min(self._values) <= 0:
            raise ValueError(f"changes {changes} after {value:g}: the times must grow, and all values be positive")

    def at(self, now: float) -> float:
        """The value at a time."""
        return self._values[max(bisect_right(self._times, now) - 1, 0)]

    def changes(self, start: float, end: float) -> list[float]:
        """The times of the changes between two times, exclusive."""
        return [time for time in self._times if start < time < end]

    def sum(self, start: float, end: float) -> float:
        """The integral from one time to another."""
        edges = [start, *self.changes(start, end), end]
        return sum(self.at(left) * (right - left) for left, right in pairwise(edges))

    def reaches(self, start: float, total: float) -> float:
        """Seconds after `start` at which the integral from there is `total`."""
        now, left = start, total
        for time in self._times:
            if time <= now:
                continue
            within = self.at(now) * (time - now)
            if within >= left:
                break
            now, left = time, left - within
        return now - start + left / self.at(now)

    def scaled(self, factor: float) -> Schedule:
        """The same changes, with all values times `factor`."""
        first, *others = zip(self._times, [value * factor for value in self._values], strict=True)
        return Schedule(first[1], *others)


def duration(seconds: float) -> str:
    """A time in the form of OpenAI's headers: `120ms`, `7.66s`, `6m0s`, `1h0m0s`."""
    milliseconds = math.ceil(seconds * 1e3 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    shown = f"{rest / 1e3:g}s"
    if not minutes:
        return shown
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{shown}" if hours else f"{minutes}m{shown}"
