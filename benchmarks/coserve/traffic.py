"""The traffic: chat-like requests at random times, and endless lines of a job with the same lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from batchwright import InferenceRequest
from batchwright.request import Traffic

_SEED = 2026
_PROMPT = (30, 150)
_OUTPUT = (32, 160)
MEAN_OUTPUT = sum(_OUTPUT) / 2


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds from the beginning of the run."""
    request: InferenceRequest


def arrivals(rate: float, vocab_size: int) -> Iterator[Arrival]:
    """Online requests, Poisson with `rate` per second, the same ones for the same rate."""
    draw, requests, now = random.Random(f"{_SEED}/times"), _requests("online", vocab_size), 0.0
    while True:
        now += draw.expovariate(rate)
        yield Arrival(now, next(requests))


def lines(vocab_size: int) -> Iterator[InferenceRequest]:
    """The lines of the job."""
    return _requests("batch", vocab_size)


def _requests(traffic: Traffic, vocab_size: int) -> Iterator[InferenceRequest]:
    draw = random.Random(f"{_SEED}/{traffic}")
    ordinary = range(vocab_size // 40, vocab_size)  # the lowest ids are control tokens
    while True:
        prompt = draw.choices(ordinary, k=draw.randint(*_PROMPT))
        yield InferenceRequest(
            prompt, max_tokens=draw.randint(*_OUTPUT), temperature=0.0, ignore_eos=True, traffic=traffic
        )
