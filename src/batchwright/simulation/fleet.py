"""Replicas of an engine in virtual time, and the requests that reach them.

One replica computes like an engine in the process of its caller; several get their requests from `Router`, as in a real
service. Lines of a job are read when there is room, as by `run` and the service's worker.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from batchwright.engine_config import EngineConfig
from batchwright.planning.arrangement import Caches
from batchwright.planning.job_order import JobOrder
from batchwright.request import Traffic
from batchwright.routing.router import Capacity, Router
from batchwright.routing.work import Work
from batchwright.scheduling.sizes import BLOCK_SIZE, EngineSizes
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.replica import ReplicaFigures, Served, SimulatedReplica
from batchwright.simulation.requests import SimulatedRequest

_HELD = 2
"""Sequences that are held for each place of the engines, so that no place stays empty while lines are read."""
_PREFILL_STEP = 512


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of identical engines."""

    replicas: int
    sizes: EngineSizes
    config: EngineConfig
    costs: StepCosts
    seed: int | None = 0
    """Seed of the errors of steps; None: each takes its mean."""

    @property
    def token_seconds(self) -> tuple[float, float]:
        """Seconds per token of a prompt, and per token of an answer when all places are taken."""
        prompt = min(_PREFILL_STEP, self.sizes.max_batch_tokens)
        rows = self.sizes.max_num_seqs
        prefill = self.costs.seconds(StepShape(prompt, prompt * prompt // 2))
        return prefill / prompt, self.costs.seconds(StepShape(0, 0, rows, rows * _PREFILL_STEP, rows)) / rows

    def engines(self) -> list[SimulatedReplica]:
        """Return new engines, which hold nothing."""
        return [
            SimulatedReplica(
                self.sizes.scheduler(self.config),
                self.costs,
                max_model_len=self.sizes.max_model_len,
                seed=None if self.seed is None else f"steps {self.seed} {number}",
            )
            for number in range(self.replicas)
        ]


@dataclass(slots=True)
class SimulationResult:
    """What happened to every request, and what every engine did."""

    served: list[Served] = field(default_factory=list)
    """Requests in the order of their end or refusal."""
    replicas: list[ReplicaFigures] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds until the last request had ended."""

    def of(self, traffic: Traffic) -> list[Served]:
        """Return the requests of one class of traffic."""
        return [each for each in self.served if each.request.traffic == traffic]


def simulate(
    fleet: Fleet,
    online: Iterable[SimulatedRequest],
    job: Sequence[SimulatedRequest] = (),
    *,
    planned: bool = False,
    progress: Callable[[int], None] = lambda ended: None,
) -> SimulationResult:
    """Compute `online` requests, which arrive at their times, and the lines of a `job`, which are there from the start.

    `planned`: whether lines are started in the order that `JobOrder` finds, as in `run`, or in that of `job`. A single
    engine that computes nothing but a planned job keeps no answers in its cache, as in `run`. `progress` is called
    often, with the number of requests that have ended. Raises ValueError if there is not at least one replica.
    """
    if fleet.replicas < 1:
        raise ValueError(f"replicas={fleet.replicas}: must be at least 1")
    return _Simulation(fleet, online, job, progress, planned=planned).run()


class _Simulation:
    def __init__(
        self,
        fleet: Fleet,
        online: Iterable[SimulatedRequest],
        job: Sequence[SimulatedRequest],
        progress: Callable[[int], None],
        *,
        planned: bool,
    ) -> None:
        self._progress = progress
        self._engines = fleet.engines()
        self._arrivals = sorted(online, key=lambda each: each.arrived_at)
        self._job = [replace(each, traffic="batch", arrived_at=0.0) for each in job]
        self._arrived = self._read = self._submitted = 0
        self._result = SimulationResult(replicas=[each.figures for each in self._engines])
        self._places = fleet.sizes.max_num_seqs * fleet.replicas
        self._held: Counter[Traffic] = Counter()
        self._order = _order(fleet) if planned else None
        if planned and fleet.replicas == 1 and not self._arrivals:
            # As `JobRun` does with an engine of its own: no prompt of a job begins with one of its answers.
            self._engines[0].scheduler.forget_answers()
        self._lines: dict[int, int] = {}
        """Places in the job of the lines that were started, by their serial numbers."""
        self._router = _router(fleet) if fleet.replicas > 1 else None
        self._waiting: dict[int, Served] = {}
        """Requests that no engine has yet, by their numbers."""
        self._ends: list[tuple[float, int]] = []
        """Heap of the ends of steps, with the numbers of their engines."""

    def run(self) -> SimulationResult:
        now = 0.0
        self._admit(now)
        self._hand_out(now)
        while self._ends or self._arrived < len(self._arrivals):
            arrival = self._arrivals[self._arrived].arrived_at if self._arrived < len(self._arrivals) else math.inf
            if not self._ends or arrival <= self._ends[0][0]:
                now = arrival
            else:
                now, number = heapq.heappop(self._ends)
                for served in self._engines[number].end(now):
                    self._finished(served)
            self._admit(now)
            self._hand_out(now)
        self._result.seconds = now
        return self._result

    def _admit(self, now: float) -> None:
        """Take the requests that have arrived by now."""
        while self._arrived < len(self._arrivals) and self._arrivals[self._arrived].arrived_at <= now:
            self._submit(self._arrivals[self._arrived])
            self._arrived += 1

    def _hand_out(self, now: float) -> None:
        """Read lines while there is room, give requests to engines, and begin the steps of those that have work."""
        self._read_lines()
        while not self._assign(now):
            # A refused request leaves room, and there may be no step whose end would be the next occasion to fill it.
            self._read_lines()
        for number, engine in enumerate(self._engines):
            if not engine.is_computing and (end := engine.begin(now)) is not None:
                heapq.heappush(self._ends, (end, number))

    def _read_lines(self) -> None:
        while self._room > 0 and (number := self._next_line()) is not None:
            self._lines[self._submitted] = number
            self._submit(self._job[number])

    def _assign(self, now: float) -> bool:
        """Give requests to the engines that the router finds for them. False if one was refused."""
        if self._router is None:
            return True
        taken = [self._give(self._waiting.pop(key), number) for key, number in self._router.assign(now)]
        return all(taken)

    def _next_line(self) -> int | None:
        """Take the next line of the job, by its place in it; None if there is none."""
        if self._order is None:
            if self._read == len(self._job):
                return None
            self._read += 1
            return self._read - 1
        while True:
            # As `JobLoop` does, which reads two lines for each that it starts.
            for _ in range(2):
                if self._read < len(self._job) and not self._order.full:
                    self._order.add(self._read, self._read, size=0, shape=self._job[self._read].shape(BLOCK_SIZE))
                    self._read += 1
            more = self._read < len(self._job)
            if (number := self._order.take(more=more)) is not None or not more:
                return number

    @property
    def _room(self) -> int:
        # As `EngineInference.room`.
        return max(_HELD * self._places - self._held.total(), self._places - self._held["batch"])

    def _submit(self, request: SimulatedRequest) -> None:
        served = Served(request, self._submitted)
        self._submitted += 1
        self._held[request.traffic] += 1
        if self._router is None:
            self._give(served, 0)
            return
        self._waiting[served.serial] = served
        work = Work(request.prompt_tokens, request.limit, prefixes=request.prefix_keys, traffic=request.traffic)
        self._router.submit(served.serial, work)

    def _give(self, served: Served, number: int) -> bool:
        """Give a request to an engine. False if it could never be computed: then it has ended."""
        is_taken = self._engines[number].add(served)
        if not is_taken:
            self._finished(served)
        return is_taken

    def _finished(self, served: Served) -> None:
        self._result.served.append(served)
        self._progress(len(self._result.served))
        self._held[served.request.traffic] -= 1
        line = self._lines.pop(served.serial, None)
        if self._order is not None and line is not None:
            self._order.ended(line, None if served.refused else served.request.output_tokens)
        if self._router is not None:
            self._router.finish(served.serial, None if served.refused else served.request.output_tokens)


def _order(fleet: Fleet) -> JobOrder[int]:
    caches = Caches(fleet.replicas, fleet.replicas * fleet.sizes.num_blocks, BLOCK_SIZE)
    return JobOrder(fleet.sizes.max_num_seqs * fleet.replicas, caches=caches)


def _router(fleet: Fleet) -> Router[int]:
    router: Router[int] = Router()
    capacity = Capacity(fleet.sizes.max_num_seqs, fleet.sizes.num_blocks * BLOCK_SIZE)
    for number in range(fleet.replicas):
        router.join(number, capacity)
        router.learn(number, *fleet.token_seconds)
    return router
