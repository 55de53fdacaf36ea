"""One engine in virtual time: the scheduler, the KV blocks and the SLO of a real one, over the costs of its steps.

Does what `EngineCore` does around its model, in the same order, with known lengths in place of chosen tokens: plan,
compute, commit, append a token to each sequence that got one, end those that are complete, measure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from batchwright.scheduling import Scheduler, Sequence, StepPlan
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.requests import SimulatedRequest, own_token

WhyRefused: TypeAlias = Literal["context", "kv_cache"]


class Refusal(NamedTuple):
    """Why a request could never be computed."""

    reason: WhyRefused
    """What it is too long for."""
    message: str


@dataclass(slots=True, eq=False)
class Served:
    """A request and what became of it; times are seconds from the beginning."""

    request: SimulatedRequest
    serial: int
    sequence: Sequence | None = None
    refusal: Refusal | None = None
    first_token_at: float = 0.0
    ended_at: float = 0.0
    cached_tokens: int = 0
    """Tokens of its prompt that were found in the cache."""
    preemptions: int = 0

    @property
    def refused(self) -> bool:
        """Whether it could never be computed."""
        return self.refusal is not None

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_token_at - self.request.arrived_at

    @property
    def tpot(self) -> float | None:
        """Mean seconds of the tokens after the first; None where there is only one."""
        others = self.request.output_tokens - 1
        return (self.ended_at - self.first_token_at) / others if others else None


@dataclass(slots=True)
class ReplicaFigures:
    """What one engine did."""

    steps: int = 0
    busy_seconds: float = 0.0
    computed_tokens: int = 0
    occupancy_sum: int = 0
    """Sum over steps of the sequences in them."""
    kv_blocks_peak: int = 0
    kv_block_seconds: float = 0.0
    """Blocks in use, times the seconds for which they were."""


class SimulatedReplica:
    """An engine that computes in virtual time."""

    def __init__(
        self, scheduler: Scheduler, costs: StepCosts, *, max_model_len: int, seed: str | None = "steps"
    ) -> None:
        """`seed` of the errors of steps, which are drawn from those of the fit; None: each step takes the mean."""
        self.scheduler = scheduler
        self._max_model_len = max_model_len
        self.figures = ReplicaFigures()
        self._costs = costs
        self._draw = None if seed is None else random.Random(seed)
        self._served: dict[int, Served] = {}
        """Unfinished requests by the ordinals of their sequences."""
        self._learns = scheduler.slo.ttft is not None or scheduler.slo.tpot is not None
        """Whether the scheduler asks how long steps take: for an SLO, and where several owners share the engine."""
        self._step: tuple[StepPlan, float] | None = None
        """The step that is being computed, and its seconds."""

    def __len__(self) -> int:
        """Number of unfinished requests."""
        return len(self._served)

    @property
    def is_computing(self) -> bool:
        return self._step is not None

    def refusal(self, request: SimulatedRequest) -> Refusal | None:
        """Return why a request could never be computed; None if it could."""
        prompt, limit = request.prompt_tokens, request.limit
        if prompt + limit > self._max_model_len:
            longest = f"the {self._max_model_len:,} of the model"
            return Refusal("context", f"{prompt:,} prompt tokens and {limit:,} of the answer exceed {longest}")
        message = self.scheduler.refusal(prompt, limit)
        return None if message is None else Refusal("kv_cache", message)

    def add(self, served: Served) -> bool:
        """Take a request. If it could never be computed, refuse it and return False."""
        request = served.request
        if (refusal := self.refusal(request)) is not None:
            served.refusal = refusal
            return False
        sequence = Sequence(
            tokens=request.tokens(served.serial),
            num_prompt=request.prompt_tokens,
            max_total=request.prompt_tokens + request.limit,
            arrived_at=request.arrived_at,
            traffic=request.traffic,
            flow=request.flow,
        )
        served.sequence = sequence
        self._learns = self._learns or request.flow is not None
        self.scheduler.add(sequence)
        self._served[sequence.ordinal] = served
        return True

    def begin(self, now: float) -> float | None:
        """Begin a step, and return when it will end; None if there is nothing to compute."""
        if not self.scheduler.has_work:
            return None
        plan = self.scheduler.schedule(now)
        if not plan.chunks:
            return None
        for preempted in plan.preempted:
            self._served[preempted.ordinal].preemptions += 1
        shape = StepShape.of(plan.chunks)
        seconds = self._costs.seconds(shape) if self._draw is None else self._costs.drawn(shape, self._draw.random())
        self._step = plan, seconds
        return now + seconds

    def end(self, now: float) -> list[Served]:
        """End the step, at the time that `begin` has predicted, and return the requests that it completed."""
        assert self._step is not None
        (plan, seconds), self._step = self._step, None
        self.scheduler.commit(plan)
        self._count(plan, seconds)
        ended: list[Served] = []
        for chunk in plan.chunks:
            if chunk.samples:
                sequence = chunk.sequence
                served = self._served[sequence.ordinal]
                sequence.tokens.append(own_token(served.serial))
                generated = len(sequence.tokens) - sequence.num_prompt
                if generated == 1:
                    served.first_token_at = now
                if generated >= served.request.output_tokens:
                    ended.append(served)
        for served in ended:
            self._finish(served, now)
        if self._learns:
            self.scheduler.measured(plan, seconds)
        return ended

    def _finish(self, served: Served, now: float) -> None:
        sequence = served.sequence
        assert sequence is not None
        self.scheduler.finish(sequence)
        del self._served[sequence.ordinal]
        served.ended_at, served.cached_tokens, served.sequence = now, sequence.num_cached, None

    def _count(self, plan: StepPlan, seconds: float) -> None:
        figures, used = self.figures, self.scheduler.blocks.num_used
        figures.steps += 1
        figures.busy_seconds += seconds
        figures.computed_tokens += plan.num_tokens
        figures.occupancy_sum += len(plan.chunks)
        figures.kv_blocks_peak = max(figures.kv_blocks_peak, used)
        figures.kv_block_seconds += used * seconds
