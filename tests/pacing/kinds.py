"""The kinds of limits that providers apply, each as one provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from benchmarks.provider.amounts import Charge, Quantity, Schedule
from benchmarks.provider.limits import (
    Concurrency,
    FixedWindow,
    Limits,
    SlidingWindow,
    Slope,
    TokenBucket,
    per_day,
    per_second,
)

from batchwright.pacing.limits import ConfiguredLimit

from .simulation import Measured, Says, allowed, simulate, works

REQUESTS, TOKENS = Quantity.REQUESTS, Quantity.TOKENS


@dataclass(frozen=True, slots=True)
class Kind:
    """A provider, and how much it allows."""

    limits: Callable[[], Limits]
    quantity: Quantity = REQUESTS
    """What is counted to compare clients."""
    headers: Literal["openai", "anthropic"] = "openai"
    told: tuple[ConfiguredLimit, ...] = ()
    seconds: float = 180.0
    requests: int = 4000
    """More than it allows in that time."""

    is_settled: bool = False
    """Whether requests are charged with what they took, at their end."""

    def measure(self, says: Says, told: tuple[ConfiguredLimit, ...] = (), *, seed: int = 1) -> tuple[float, Measured]:
        """Return what the pacer gets, also as a share of what a client gets that knows everything."""
        work = works(seed)
        measured = simulate(self.limits(), work, seconds=self.seconds, says=says, told=told)
        if self.is_settled:
            bounds = [each.most(self.seconds) for each in self.limits().limits if each.quantity is self.quantity]
            return measured.used(self.quantity) / min(bounds), measured
        return measured.charged(self.quantity) / _allowed(self, seed), measured


@cache
def _allowed(kind: Kind, seed: int) -> float:
    return allowed(kind.limits(), works(seed), kind.quantity, seconds=kind.seconds, requests=kind.requests)


def _bucket(limit: float | Schedule, burst: float = 60.0, *, count_refused: bool = False) -> Callable[[], Limits]:
    return lambda: Limits(TokenBucket("requests", REQUESTS, limit, burst=burst), count_refused=count_refused)


def _tokens(limit: float | Schedule, charge: Charge = Charge.ESTIMATE, burst: float = 60.0) -> Callable[[], Limits]:
    return lambda: Limits(TokenBucket("tokens per min (TPM)", TOKENS, limit, charge=charge, burst=burst))


def _both() -> Limits:
    return Limits(
        TokenBucket("requests per min (RPM)", REQUESTS, 900, burst=5),
        TokenBucket("tokens per min (TPM)", TOKENS, 300_000, burst=5),
    )


def _settled() -> Limits:
    return Limits(
        TokenBucket("requests per minute", REQUESTS, 3000, burst=5),
        TokenBucket("input tokens per minute", Quantity.INPUT_TOKENS, 120_000, burst=5, charge=Charge.ADJUSTED),
        TokenBucket("output tokens per minute", Quantity.OUTPUT_TOKENS, 60_000, burst=5, charge=Charge.ACTUAL),
    )


KINDS: Mapping[str, Kind] = {
    "bucket 60": Kind(_bucket(60), told=(ConfiguredLimit("requests", 60),)),
    "bucket 600": Kind(_bucket(600), told=(ConfiguredLimit("requests", 600),)),
    "bucket 6000": Kind(_bucket(6000), told=(ConfiguredLimit("requests", 6000),), seconds=90.0, requests=16_000),
    "bucket 600 of 5 s": Kind(_bucket(600, 5.0), told=(ConfiguredLimit("requests", 600),)),
    "bucket, refusals count": Kind(_bucket(600, 5.0, count_refused=True), told=(ConfiguredLimit("requests", 600),)),
    "tokens 300k": Kind(_tokens(300_000), TOKENS),
    "tokens 300k of 5 s": Kind(_tokens(300_000, burst=5.0), TOKENS),
    "tokens 3M": Kind(_tokens(3_000_000), TOKENS, seconds=90.0, requests=15_000),
    "tokens, adjusted": Kind(_tokens(300_000, Charge.ADJUSTED), TOKENS, requests=6000),
    "tokens, as they come": Kind(_tokens(300_000, Charge.ACTUAL), TOKENS, is_settled=True),
    "requests and tokens": Kind(_both, TOKENS),
    "Anthropic's three": Kind(_settled, Quantity.OUTPUT_TOKENS, headers="anthropic", is_settled=True),
    "fixed window 600": Kind(
        lambda: Limits(FixedWindow("requests", REQUESTS, 600)), told=(ConfiguredLimit("requests", 600),), seconds=179.0
    ),
    "fixed window of tokens": Kind(lambda: Limits(FixedWindow("tokens", TOKENS, 300_000)), TOKENS, seconds=179.0),
    "sliding window 600": Kind(
        lambda: Limits(SlidingWindow("requests", REQUESTS, 600)),
        told=(ConfiguredLimit("requests", 600),),
        seconds=179.0,
    ),
    "10 in each second": Kind(lambda: Limits(per_second("requests", 600, stated=True))),
    "100 in each 10 s": Kind(lambda: Limits(per_second("requests", 600, seconds=10.0, stated=True)), seconds=179.0),
    "a minute's, by the second": Kind(
        lambda: Limits(TokenBucket("requests", REQUESTS, 600), per_second("by the second", 900))
    ),
    "a day's and a minute's": Kind(
        lambda: Limits(TokenBucket("requests", REQUESTS, 600, burst=5), per_day("requests per day", 14_400))
    ),
    "16 at once": Kind(lambda: Limits(Concurrency("requests under way", 16))),
    "100 at once": Kind(lambda: Limits(Concurrency("requests under way", 100)), requests=14_000),
    "at once, drifting": Kind(
        lambda: Limits(Concurrency("requests under way", Schedule(60, (60, 30), (120, 60)))), requests=7000
    ),
    "bucket, drifting": Kind(_bucket(Schedule(900, (60.0, 450.0), (120.0, 900.0)), 5.0)),
    "tokens, drifting": Kind(_tokens(Schedule(400_000, (60.0, 200_000), (120.0, 400_000)), burst=5.0), TOKENS),
    "slope": Kind(lambda: Limits(TokenBucket("requests", REQUESTS, 900, burst=5), Slope("acceleration", REQUESTS, 10))),
}

SAYS: Mapping[str, Says] = {
    "everything": Says(headers="openai", retry_after=True, text=True),
    "headers": Says(headers="openai", retry_after=True),
    "headers only": Says(headers="openai"),
    "retry-after": Says(retry_after=True),
    "text": Says(text=True),
    "nothing": Says(),
}
