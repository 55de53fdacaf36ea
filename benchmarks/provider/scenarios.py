"""The providers that clients are measured against: their limits, what clients are told about them, and their faults.

Each scenario allows about ten requests a second, so that many clients can be measured side by side on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.provider.amounts import Charge, Quantity, Schedule
from benchmarks.provider.answers import Fault, Law
from benchmarks.provider.limits import (
    AtRandom,
    Concurrency,
    FixedWindow,
    Limits,
    SlidingWindow,
    Slope,
    TokenBucket,
    per_second,
)

Headers = Literal["openai", "anthropic"]

MAX_TOKENS = 200
"""`max_tokens` of each request, whatever the length of its answer."""


@dataclass(frozen=True, slots=True)
class GivenLimits:
    """Limits that a client may be given in advance. None: there is no such limit."""

    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One provider."""

    title: str
    limits: Callable[[], Limits]
    """Creates fresh limits: full, at time 0."""
    given: GivenLimits
    law: Law = field(default_factory=Law)
    seconds: float = 150.0
    """Seconds in which a clairvoyant client finishes the job."""
    headers: Headers = "openai"
    """The form in which it states its limits, if it does."""
    window: float | None = None
    """Seconds of a window whose whole amount may be used at any time in it; None: it is refilled continuously."""
    shared_prefix: int = 0
    """Tokens with which all prompts begin."""


def _rpm() -> Limits:
    return Limits(TokenBucket("requests per minute", Quantity.REQUESTS, 600, burst=5), count_refused=True)


def _rpm_minute() -> Limits:
    return Limits(TokenBucket("requests per minute", Quantity.REQUESTS, 600), count_refused=True)


def _tpm() -> Limits:
    return Limits(
        TokenBucket("requests per minute", Quantity.REQUESTS, 3000, burst=5),
        TokenBucket("tokens per minute", Quantity.TOKENS, 180_000, burst=5),
    )


def _settled() -> Limits:
    """As Anthropic counts: input on arrival, output as it comes."""
    return Limits(
        TokenBucket("requests per minute", Quantity.REQUESTS, 3000, burst=5),
        TokenBucket("input tokens per minute", Quantity.INPUT_TOKENS, 240_000, burst=5, charge=Charge.ADJUSTED),
        TokenBucket("output tokens per minute", Quantity.OUTPUT_TOKENS, 30_000, burst=5, charge=Charge.ACTUAL),
    )


def _fixed() -> Limits:
    return Limits(FixedWindow("requests per minute", Quantity.REQUESTS, 600))


def _sliding() -> Limits:
    return Limits(SlidingWindow("requests per minute", Quantity.REQUESTS, 600))


def _quantized() -> Limits:
    return Limits(per_second("requests per minute, by the second", 600, stated=True))


def _concurrency() -> Limits:
    return Limits(Concurrency("requests under way", 16))


def _crowded() -> Limits:
    return Limits(AtRandom(0.05), TokenBucket("requests per minute", Quantity.REQUESTS, 600, burst=5))


def _slope() -> Limits:
    return Limits(
        TokenBucket("requests per minute", Quantity.REQUESTS, 900, burst=5),
        Slope("acceleration", Quantity.REQUESTS, 10, growth=1.5, seconds=5.0),
    )


def _drift() -> Limits:
    schedule = Schedule(900, (60.0, 450), (120.0, 900))
    return Limits(TokenBucket("requests per minute", Quantity.REQUESTS, schedule, burst=5))


SCENARIOS: Mapping[str, Scenario] = {
    "rpm": Scenario("requests per minute, a bucket of 5 s", _rpm, GivenLimits(rpm=600)),
    "rpm-minute": Scenario("requests per minute, a bucket of a minute", _rpm_minute, GivenLimits(rpm=600)),
    "tpm": Scenario("tokens per minute, `max_tokens` counted on arrival", _tpm, GivenLimits(rpm=3000, tpm=180_000)),
    "settled": Scenario(
        "input and output tokens per minute, adjusted", _settled, GivenLimits(rpm=3000), headers="anthropic"
    ),
    "fixed": Scenario("a count that begins anew each minute", _fixed, GivenLimits(rpm=600), seconds=170.0, window=60.0),
    "sliding": Scenario("at most 600 in any minute", _sliding, GivenLimits(rpm=600), seconds=170.0, window=60.0),
    "quantized": Scenario("requests per minute, by the second", _quantized, GivenLimits(rpm=600)),
    "concurrency": Scenario("16 requests under way", _concurrency, GivenLimits(concurrency=16)),
    "slope": Scenario("usage may rise by half in 5 s", _slope, GivenLimits(rpm=900)),
    "drift": Scenario("halved after 60 s, doubled after 120 s", _drift, GivenLimits(rpm=900), seconds=170.0),
    "crowded": Scenario("requests per minute, and 5% refused at random", _crowded, GivenLimits(rpm=600)),
    "errors": Scenario(
        "5% of each fault",
        _rpm,
        GivenLimits(rpm=600),
        law=Law(faults=dict.fromkeys(Fault, 0.05)),
        shared_prefix=1200,
    ),
}
