"""What the provider does with a request: the length and time of its answer, whether it fails, and its cost.

All of it is drawn from a seed, the number of the line and the number of its attempt, so that every client gets the same
answers and the same failures, in any order of requests.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.provider.amounts import Usage

CHARACTERS_PER_TOKEN = 4
_CACHED_FROM = 1024
_CACHED_STEP = 128
_CACHED_SECONDS = 300.0
_ERROR_SECONDS = 0.05
_NANODOLLARS = 1000
"""Nanodollars per token, for each dollar per million tokens."""


class Fault(StrEnum):
    """A way in which an admitted request fails."""

    SERVER_ERROR = "500"
    UNAVAILABLE = "503"
    OVERLOADED = "529"
    TIMEOUT = "408"
    RESET = "reset"
    """The connection is reset before the response's head."""
    BROKEN = "broken"
    """The connection is reset in the middle of the body."""
    TRUNCATED = "truncated"
    """The JSON is cut off, in a complete response."""
    HTML = "html"
    """A page instead of JSON, with status 200."""
    SLOW = "slow"
    """The answer is correct, but very late."""

    @property
    def billed(self) -> bool:
        """Whether the tokens were computed and are billed."""
        return self in (Fault.BROKEN, Fault.TRUNCATED, Fault.SLOW)

    @property
    def answers(self) -> bool:
        """Whether the client gets the answer nevertheless."""
        return self is Fault.SLOW


@dataclass(frozen=True, slots=True)
class Law:
    """Lengths and times. A log-normal variable is given by its median and by the deviation of its logarithm."""

    seed: int = 1
    output_tokens: float = 40.0
    output_spread: float = 0.7
    first_token: float = 0.35
    """Seconds until the first token."""
    first_token_spread: float = 0.3
    per_token: float = 0.02
    """Seconds for each token."""
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """Share of attempts with each fault."""
    timeout_seconds: float = 5.0
    slow_seconds: float = 20.0
    """Seconds that `Fault.SLOW` adds."""

    def draw(self, line: int, attempt: int, max_tokens: int) -> Fate:
        """What becomes of an attempt at a line, both counted from 0."""
        chance = random.Random(f"{self.seed} {line}")
        tokens = min(max(round(chance.lognormvariate(math.log(self.output_tokens), self.output_spread)), 1), max_tokens)
        first = chance.lognormvariate(math.log(self.first_token), self.first_token_spread)
        seconds = first + tokens * self.per_token
        fault = self._fault(random.Random(f"{self.seed} {line} {attempt}").random())
        match fault:
            case Fault.SERVER_ERROR | Fault.UNAVAILABLE | Fault.OVERLOADED:
                seconds = _ERROR_SECONDS
            case Fault.TIMEOUT:
                seconds = self.timeout_seconds
            case Fault.RESET | Fault.HTML:
                seconds = first
            case Fault.SLOW:
                seconds += self.slow_seconds
        return Fate(tokens, seconds, fault)

    def _fault(self, drawn: float) -> Fault | None:
        for fault, share in self.faults.items():
            drawn -= share
            if drawn < 0:
                return fault
        return None


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of an attempt."""

    output_tokens: int
    seconds: float
    """Seconds from its admission to its end."""
    fault: Fault | None

    @property
    def answered(self) -> bool:
        """Whether the client gets the answer."""
        return self.fault is None or self.fault.answers

    @property
    def billed(self) -> bool:
        """Whether the client pays for it."""
        return self.fault is None or self.fault.billed


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars per million tokens."""

    input: float = 2.5
    cached: float = 1.25
    """Price of input that was read from the cache."""
    output: float = 10.0

    def nanodollars(self, usage: Usage) -> int:
        """The price of a request, exactly."""
        fresh = usage.input_tokens - usage.cached_tokens
        dollars = fresh * self.input + usage.cached_tokens * self.cached + usage.output_tokens * self.output
        return round(dollars * _NANODOLLARS)


def tokens_of(text: str) -> int:
    """The number of tokens of a text, as in OpenAI's estimate for limits: one token per four characters."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


class PromptCache:
    """The prefixes of prompts that were seen recently.

    As OpenAI describes it, <https://developers.openai.com/api/docs/guides/prompt-caching>: prompts of 1,024 tokens or
    more, in steps of 128 tokens, kept for five minutes after their last use.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, float] = OrderedDict()

    def cached_tokens(self, now: float, text: str) -> int:
        """The tokens of the longest prefix that is held."""
        self._forget(now)
        held = 0
        for tokens, key in _prefixes(text):
            if key not in self._seen:
                break
            held = tokens
        return held

    def add(self, now: float, text: str) -> None:
        """Hold all prefixes of a prompt from now on."""
        for _, key in _prefixes(text):
            self._seen[key] = now
            self._seen.move_to_end(key)

    def _forget(self, now: float) -> None:
        while self._seen and now - next(iter(self._seen.values())) > _CACHED_SECONDS:
            self._seen.popitem(last=False)


def _prefixes(text: str) -> list[tuple[int, int]]:
    """The number of tokens and a key of each prefix that can be held, the shortest first."""
    lengths = range(_CACHED_FROM, len(text) // CHARACTERS_PER_TOKEN + 1, _CACHED_STEP)
    return [(tokens, hash(text[: tokens * CHARACTERS_PER_TOKEN])) for tokens in lengths]
