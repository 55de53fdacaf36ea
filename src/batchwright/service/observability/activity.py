"""Recent activity of this process: counters sampled every second, and rates and curves made from the samples."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchwright.clock import Clock
from batchwright.request import Traffic
from batchwright.service.observability.figures import engine_stats
from batchwright.service.observability.measured import MeasuredInference

PERIOD = 1.0
"""Seconds between two samples."""
HISTORY = 120
"""Number of periods that are kept."""
WINDOW = 10
"""Number of periods over which a rate is taken."""


@dataclass(frozen=True)
class TokenRates:
    """Tokens per second over the last ten seconds."""

    prompt: float = 0.0
    generated: float = 0.0


@dataclass(frozen=True)
class Point:
    """One second of the past, as a point of a curve."""

    at: float
    """Unix seconds."""
    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    online: int
    """Number of online requests waiting or running."""
    batch: int
    """Number of batch lines waiting in the engine or running."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token counters since the process started."""

    prompt: int
    generated: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment."""

    at: float
    """Time in seconds of the clock; `unix` in Unix seconds."""
    unix: float
    tokens: Mapping[Traffic, Tokens]
    in_flight: Mapping[Traffic, int]
    steps: int
    occupancy_sum: int


class Live:
    """Recorder of the last two minutes of this process."""

    def __init__(self, inference: MeasuredInference, clock: Clock, unix_time: Callable[[], float] = time.time) -> None:
        self._inference = inference
        self._clock = clock
        self._unix_time = unix_time
        self._samples: deque[Sample] = deque([self._sample()], maxlen=HISTORY + 1)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            self.tick()

    def tick(self) -> None:
        """Take one sample."""
        self._samples.append(self._sample())

    def rates(self, traffic: Traffic) -> TokenRates:
        """Return the recent tokens per second."""
        return _rates(*self._window(), traffic)

    @property
    def occupancy(self) -> float | None:
        """Mean number of sequences in recent steps; None when there were no steps."""
        first, last = self._window()
        steps = last.steps - first.steps
        return (last.occupancy_sum - first.occupancy_sum) / steps if steps > 0 else None

    def snapshot(self, lines: int) -> dict[str, Any]:
        """Return what other processes show of this one, which is computing `lines` lines."""
        online, batch = self.rates("online"), self.rates("batch")
        return {
            "online": self._inference.figures["online"].in_flight,
            "lines": lines,
            "prompt": round(online.prompt + batch.prompt, 1),
            "generated": round(online.generated + batch.generated, 1),
        }

    def history(self) -> list[Point]:
        """Return a point for each second, oldest first."""
        return [_point(before, after) for before, after in pairwise(list(self._samples))]

    def _window(self) -> tuple[Sample, Sample]:
        return self._samples[max(0, len(self._samples) - 1 - WINDOW)], self._samples[-1]

    def _sample(self) -> Sample:
        figures = self._inference.figures
        engine = engine_stats(self._inference.inner)
        # The engine counts tokens when they are computed, `figures` counts those of a call when it is answered.
        tokens = {name: Tokens(each.prompt_tokens, each.generated_tokens) for name, each in figures.items()}
        if engine is not None:
            for name, each in engine.traffic.items():
                tokens[name] = Tokens(each.prefill_tokens + figures[name].embedded_tokens, each.generated_tokens)
        return Sample(
            at=self._clock.now(),
            unix=self._unix_time(),
            tokens=tokens,
            in_flight={name: each.in_flight for name, each in figures.items()},
            steps=0 if engine is None else engine.steps,
            occupancy_sum=0 if engine is None else engine.occupancy_sum,
        )


def _rates(first: Sample, last: Sample, traffic: Traffic) -> TokenRates:
    seconds = last.at - first.at
    if seconds <= 0:
        return TokenRates()
    before, after = first.tokens[traffic], last.tokens[traffic]
    return TokenRates(
        prompt=(after.prompt - before.prompt) / seconds, generated=(after.generated - before.generated) / seconds
    )


def _point(before: Sample, after: Sample) -> Point:
    rates = [_rates(before, after, name) for name in after.tokens]
    return Point(
        at=after.unix,
        prompt_tokens_per_second=sum(each.prompt for each in rates),
        generated_tokens_per_second=sum(each.generated for each in rates),
        online=after.in_flight["online"],
        batch=after.in_flight["batch"],
    )
