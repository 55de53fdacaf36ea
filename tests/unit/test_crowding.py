"""A quiet client beside one who asks for everything, in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import count

import pytest

from batchwright.kv import BlockManager
from batchwright.request import Flow
from batchwright.scheduling import Scheduler, Sequence
from batchwright.scheduling.slo import StepShape

_STEP_COSTS = {
    "compiled": (10e-3, 0.31e-3, 0.1e-6, 0.40e-3, 0.9e-6),
    "plain": (40e-3, 0.60e-3, 0.25e-6, 0.75e-3, 2.0e-6),
}
"""Seconds for a step, a prompt token, a (prompt token, key) pair, a decode row, a key: SmolLM2-135M on two cores."""
_WAITS = 120
_SETTLING = 4.0
_PROMPT, _OUTPUT = 45, 4
"""Tokens of each request of the quiet client."""


@dataclass(frozen=True)
class _Crowd:
    """What one owner asks for, again and again."""

    requests: int
    sequences: int
    """Of each request."""
    prompt: int
    output: int


_CROWDS = {
    "one request for 2,048 completions": _Crowd(1, 2048, 14, 256),
    "one stream of 896 completions": _Crowd(1, 896, 14, 512),
    "a hundred long prompts": _Crowd(1, 100, 3600, 64),
    "six hundred requests": _Crowd(600, 1, 14, 512),
}


@dataclass
class _Beside:
    """A quiet client's closed loop beside a crowd, or alone, on a device that takes as long as `costs` give."""

    costs: tuple[float, ...]
    crowd: _Crowd | None
    waits: list[float] = field(default_factory=list)
    """Seconds until the first token of each of its requests."""
    met: list[float] = field(default_factory=list)
    """For each wait, mean seconds of the steps without a request of it, over the second before."""

    def play(self) -> _Beside:
        self._scheduler = Scheduler(BlockManager(2900, 16), max_batch_tokens=512, max_num_seqs=256)
        self._draw, self._serial = random.Random(3), count()
        self._alive: dict[str, int] = {}
        self._quiet: Sequence | None = None
        now, due = 0.0, _SETTLING
        steps: list[tuple[float, float]] = []
        while len(self.waits) < _WAITS:
            if self._quiet is None and due <= now:
                self._quiet = self._add(_PROMPT, _OUTPUT, Flow("quiet", f"quiet-{next(self._serial)}"), due)
                self._quiet.text_pending = True
                recent = [seconds for at, seconds in steps if at > due - 1.0] or [0.0]
                self.met.append(sum(recent) / len(recent))
            self._fill(now)
            if not self._scheduler.has_work:
                now = due
                continue
            was_there = self._quiet is not None
            seconds = self._step(now)
            now += seconds
            if not was_there:
                steps.append((now, seconds))
            elif self._quiet is None:
                due = now + self._draw.uniform(0.1, 0.2)
        return self

    def _step(self, now: float) -> float:
        plan = self._scheduler.schedule(now)
        shape = StepShape.of(plan.chunks)
        seconds = sum(cost * feature for cost, feature in zip(self.costs, shape.features, strict=True))
        seconds *= self._draw.lognormvariate(0.0, 0.03)
        self._scheduler.commit(plan)
        self._scheduler.measured(plan, seconds)
        for chunk in plan.chunks:
            if chunk.samples:
                self._took_token(chunk.sequence, now + seconds)
        return seconds

    def _took_token(self, sequence: Sequence, now: float) -> None:
        sequence.tokens.append(self._draw.randrange(50_000))
        if sequence is self._quiet and sequence.num_generated == 1:
            sequence.text_pending = False
            self.waits.append(now - sequence.arrived_at)
        if len(sequence.tokens) < sequence.max_total:
            return
        self._scheduler.finish(sequence)
        if sequence is self._quiet:
            self._quiet = None
        elif sequence.flow is not None:
            self._alive[sequence.flow.request] -= 1
            if not self._alive[sequence.flow.request]:
                del self._alive[sequence.flow.request]

    def _fill(self, now: float) -> None:
        """Send each request of the crowd again that has ended."""
        while self.crowd is not None and len(self._alive) < self.crowd.requests:
            request = f"crowd-{next(self._serial)}"
            self._alive[request] = self.crowd.sequences
            for _ in range(self.crowd.sequences):
                self._add(self.crowd.prompt, self.crowd.output, Flow("crowd", request), now)

    def _add(self, prompt: int, output: int, flow: Flow, now: float) -> Sequence:
        tokens = [next(self._serial), *[0] * (prompt - 1)]
        sequence = Sequence(tokens, prompt, prompt + output, arrived_at=now, flow=flow)
        self._scheduler.add(sequence)
        return sequence


def _p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


@pytest.mark.parametrize("costs", _STEP_COSTS.values(), ids=_STEP_COSTS)
@pytest.mark.parametrize("crowd", _CROWDS.values(), ids=_CROWDS)
def test_a_quiet_client_waits_for_one_step_and_twice_as_long_as_alone(crowd: _Crowd, costs: tuple[float, ...]) -> None:
    alone, beside = _Beside(costs, None).play(), _Beside(costs, crowd).play()
    rest = [wait - step for wait, step in zip(beside.waits, beside.met, strict=True)]
    assert _p99(rest) <= 2 * _p99(alone.waits)
