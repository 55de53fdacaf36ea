"""Two classes of traffic in virtual time, on a device that takes as long as a small model does on two cores."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from batchwright.kv import BlockManager
from batchwright.request import Traffic
from batchwright.scheduling import Scheduler, Sequence, SloController
from batchwright.scheduling.slo import StepShape

TTFT, TPOT = 1.0, 0.08
_RAMP, _SECONDS = 15.0, 60.0
_STEP_COSTS = (10e-3, 0.31e-3, 0.0, 0.40e-3, 0.9e-6)
"""Seconds for a step, a prefill token, a prefill pair, a decode row, a key: SmolLM2-135M, fitted."""
_MEAN_OUTPUT = 96


@dataclass
class Run:
    scheduler: Scheduler
    rate: float = 0.0
    job: bool = False
    tokens: dict[Traffic, int] = field(default_factory=lambda: {"online": 0, "batch": 0})
    """Generated in the window."""
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def play(self) -> Run:
        """Run, then answer those that arrived in the window."""
        self._draw = random.Random(5)
        now, due = 0.0, 0.0
        counted = 0
        first: dict[int, float] = {}
        arrival = random.Random(6)
        due = arrival.expovariate(self.rate) if self.rate else math.inf
        while now < _RAMP + _SECONDS or len(self.tpot) < counted:
            while due <= now:
                sequence = self._add("online", due)
                first[sequence.ordinal] = math.nan
                counted += _RAMP <= due < _RAMP + _SECONDS
                due += arrival.expovariate(self.rate)
            while self.job and self.scheduler.waiting_of("batch") < 256:
                self._add("batch", now)
            if not self.scheduler.has_work:
                now = due
                continue
            now = self._step(now, first)
        return self

    def _step(self, began: float, first: dict[int, float]) -> float:
        plan = self.scheduler.schedule(began)
        shape = StepShape.of(plan.chunks)
        seconds = sum(cost * feature for cost, feature in zip(_STEP_COSTS, shape.features, strict=True))
        seconds *= self._draw.lognormvariate(0.0, 0.05)
        if self._draw.random() < 0.01:
            seconds *= self._draw.uniform(1.0, 2.0)
        now = began + seconds
        self.scheduler.commit(plan)
        self.scheduler.measured(plan, seconds)
        in_window = _RAMP <= now < _RAMP + _SECONDS
        if in_window:
            self.steps.append(seconds)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if not chunk.samples:
                continue
            sequence.tokens.append(self._draw.randrange(50_000))
            self.tokens[sequence.traffic] += in_window
            if sequence.num_generated == 1 and not sequence.is_batch:
                first[sequence.ordinal] = now
            if len(sequence.tokens) >= sequence.max_total:
                self.scheduler.finish(sequence)
                if not sequence.is_batch and _RAMP <= sequence.arrived_at < _RAMP + _SECONDS:
                    at = first.pop(sequence.ordinal)
                    self.ttft.append(at - sequence.arrived_at)
                    self.tpot.append((now - at) / (sequence.num_generated - 1))
        return now

    def _add(self, traffic: Traffic, now: float) -> Sequence:
        draw = self._draw
        prompt = [draw.randrange(50_000) for _ in range(draw.randint(30, 150))]
        total = len(prompt) + draw.randint(32, 160)
        sequence = Sequence(prompt, len(prompt), total, arrived_at=now, traffic=traffic)
        self.scheduler.add(sequence)
        return sequence

    @property
    def p99_ttft(self) -> float:
        return sorted(self.ttft)[math.ceil(0.99 * len(self.ttft)) - 1]

    @property
    def step(self) -> float:
        return sum(self.steps) / len(self.steps)

    def rate_of(self, traffic: Traffic) -> float:
        return self.tokens[traffic] / _SECONDS

    def met(self) -> float:
        both = [a <= TTFT and b <= TPOT for a, b in zip(self.ttft, self.tpot, strict=True)]
        return sum(both) / len(both)


def _scheduler(*, slo: bool) -> Scheduler:
    controller = SloController(ttft=TTFT, tpot=TPOT) if slo else None
    blocks = BlockManager(5500, 16)
    return Scheduler(blocks, max_batch_tokens=512, max_num_seqs=256, batch_share=0.05, slo=controller)


@pytest.fixture(scope="module")
def job_alone() -> Run:
    return Run(_scheduler(slo=False), job=True).play()


@pytest.fixture(scope="module")
def rate(job_alone: Run) -> float:
    """Online requests a second: 30% of the capacity."""
    return 0.3 * job_alone.rate_of("batch") / _MEAN_OUTPUT


def test_a_job_fills_what_online_traffic_leaves_and_online_traffic_does_not_feel_it(
    job_alone: Run, rate: float
) -> None:
    alone = Run(_scheduler(slo=False), rate=rate).play()
    together = Run(_scheduler(slo=True), rate=rate, job=True).play()
    assert len(together.ttft) > 150
    assert together.met() >= 0.99
    assert together.p99_ttft - alone.p99_ttft <= 2 * together.step
    assert together.rate_of("batch") >= 0.8 * (job_alone.rate_of("batch") - together.rate_of("online"))


def test_without_an_slo_the_job_takes_all_that_is_left_and_online_tokens_come_late(job_alone: Run, rate: float) -> None:
    together = Run(_scheduler(slo=False), rate=rate, job=True).play()
    assert together.met() < 0.05
    assert together.rate_of("batch") >= 0.95 * (job_alone.rate_of("batch") - together.rate_of("online"))
