"""The measurements of each system, and their workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.batching.findings import COSTS, Cell, Goodput, Load, Real
from benchmarks.batching.goodput import GOAL, capacity, highest_rate, next_rate
from benchmarks.batching.peers import GREEDY, OURS, SYSTEMS, UNLIMITED, Peer, System
from benchmarks.batching.trials import TRIALS
from benchmarks.batching.worker import Run
from benchmarks.batching.workload import Workload

LOADS = (0.1, 0.3, 0.5, 0.75, 0.9, 1.1)
"""Loads as multiples of the capacity."""
_TUNING_SEED = 0
_REAL_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """Extent of the comparison."""

    seeds: Sequence[int]
    count: int
    """Requests in a run."""
    trace: Path | None
    goodput: Sequence[Cell]
    """Cells in which the highest rate is searched for."""
    loads: Sequence[tuple[Cell, float]]
    """Cells and loads that are measured."""
    faults: Sequence[tuple[Cell, float]]
    """Likewise, with callers that leave and requests that are poison."""
    urgent: Sequence[tuple[Cell, float]]
    """Likewise, with interactive requests among bulk, without limits."""
    real: Sequence[tuple[Cell, float]]
    """Cells and loads that are repeated in real time."""
    repeats: int
    """Repeats of the overhead."""
    requests: int
    """Requests in each repeat."""


def thorough(trace: Path | None, count: int | None = None) -> Plan:
    """The whole comparison; without a trace, its cells are left out."""
    lengths = ["fixed", "lognormal", *(["azure"] if trace else [])]
    goodput = [Workload("poisson", each, slo) for each in lengths for slo in (2.0, 5.0, 10.0)]
    goodput += [Workload("poisson", "lognormal", slo, limit_of="mean") for slo in (5.0, 10.0)]
    goodput += [Workload("bursts", "lognormal", slo) for slo in (5.0, 10.0)]
    goodput += [Workload("azure", "azure", slo) for slo in (5.0, 10.0) if trace]
    urgent = [Workload(lengths=each, slo=None, urgent=0.2, bulk=bulk) for bulk in _BULK for each in lengths[:2]]
    return Plan(
        seeds=(1, 2, 3, 4, 5),
        count=count or 2000,
        trace=trace,
        goodput=_cells(COSTS, goodput),
        loads=_at(LOADS, COSTS, [Workload(lengths=each) for each in lengths]),
        faults=_at(LOADS, COSTS, [Workload(lengths=each, faults=True) for each in lengths]),
        urgent=_at((0.5, 0.75, 0.9), COSTS, urgent),
        real=_at((0.75, 1.1), COSTS, [Workload(lengths=each) for each in lengths[:2]]),
        repeats=5,
        requests=20_000,
    )


def quick(trace: Path | None, count: int | None = None) -> Plan:
    """A quick comparison: one device, two seeds, the two workloads that matter most."""
    device = ("accelerator",)
    both = [Workload(lengths=each) for each in ("fixed", "lognormal")]
    return Plan(
        seeds=(1, 2),
        count=count or 1500,
        trace=trace,
        goodput=_cells(device, both),
        loads=_at((0.5, 0.9, 1.1), device, both),
        faults=_at((0.5,), device, [Workload(lengths="lognormal", faults=True)]),
        urgent=_at((0.75,), device, [Workload(lengths="lognormal", slo=None, urgent=0.2, bulk=b) for b in _BULK]),
        real=_at((0.75,), device, [Workload(lengths="lognormal")]),
        repeats=2,
        requests=min(20_000, 10 * (count or 2000)),
    )


_BULK = ("dumps", "steady")


def _cells(devices: Sequence[str] | dict[str, Any], workloads: Sequence[Workload]) -> list[Cell]:
    return [Cell(device, workload) for device in devices for workload in workloads]


def _at(
    loads: Sequence[float], devices: Sequence[str] | dict[str, Any], workloads: Sequence[Workload]
) -> list[tuple[Cell, float]]:
    return [(cell, load) for cell in _cells(devices, workloads) for load in loads]


class Study:
    """Measures one system by a plan."""

    def __init__(self, peer: Peer, plan: Plan) -> None:
        self._peer = peer
        self._plan = plan
        self._name = peer.system.name

    def goodput(self, cell: Cell) -> Iterator[Goodput]:
        """The highest rates of a cell: with default settings, and with the best settings of the grid."""
        first = self._peer.options[0]
        rates = self._highest_of_all(cell, first, 1.0)
        yield Goodput(self._name, cell, False, first, rates)
        if self._peer.system.choice is not None:
            return
        best, guess = self._tune(cell, rates[0])
        if best != first:
            rates = self._highest_of_all(cell, best, guess)
        yield Goodput(self._name, cell, True, best, rates)

    def load(self, section: str, cell: Cell, load: float) -> Iterator[Load]:
        """Results of the system with default settings at one load."""
        specs = [self._spec(cell, self._peer.options[0], load, seed) for seed in self._plan.seeds]
        results = [self._peer.run(spec) for spec in specs]
        for result in results:
            del result["cpu"]
        yield Load(self._name, section, cell, load, results)

    def real(self, cell: Cell, load: float) -> Iterator[Real]:
        """The same in virtual and in real time, with two seeds and fewer requests: it takes as long as it takes."""
        specs = [self._spec(cell, self._peer.options[0], load, seed) for seed in self._plan.seeds[:2]]
        virtual, real = (
            [
                self._peer.run({**spec, "count": min(_REAL_COUNT, spec["count"]), "virtual": virtual})["in_time"]
                for spec in specs
            ]
            for virtual in (True, False)
        )
        yield Real(self._name, cell, load, virtual, real)

    def _tune(self, cell: Cell, guess: float) -> tuple[dict[str, Any], float]:
        """Return the settings with the highest rate, the first of equals, and this rate."""
        best, *others = self._peer.options
        rate = self._highest(cell, best, _TUNING_SEED, guess)
        for options in others:
            # Not better where the next rate is already too high. Where nothing was good enough, the lowest rate says
            # little: settings that wait for more requests may do with more of them.
            if not rate or self._enough(cell, options, next_rate(rate), _TUNING_SEED):
                found = self._highest(cell, options, _TUNING_SEED, next_rate(rate) if rate else 1.0)
                if found > rate:
                    best, rate = options, found
        return best, rate

    def _highest_of_all(self, cell: Cell, options: dict[str, Any], guess: float) -> list[float]:
        rates = []
        for seed in self._plan.seeds:
            guess = self._highest(cell, options, seed, guess)
            rates.append(guess)
        return rates

    def _highest(self, cell: Cell, options: dict[str, Any], seed: int, guess: float) -> float:
        return highest_rate(lambda rate: self._enough(cell, options, rate, seed), guess)

    def _enough(self, cell: Cell, options: dict[str, Any], rate: float, seed: int) -> bool:
        spec: Run = {**self._spec(cell, options, rate, seed), "goal": GOAL}
        return self._peer.run(spec)["in_time"] >= GOAL

    def _spec(self, cell: Cell, options: dict[str, Any], load: float, seed: int) -> Run:
        cost, trace = COSTS[cell.device], self._plan.trace
        return {
            "system": "",
            "options": options,
            "cost": asdict(cost),
            "workload": asdict(cell.workload),
            "rate": load * capacity(cost, cell.workload.lengths, trace),
            "count": self._plan.count,
            "seed": seed,
            "trace": str(trace) if trace else None,
            "virtual": True,
        }


@dataclass(frozen=True, slots=True)
class Task:
    """A part of the comparison that one process does by itself."""

    system: System
    title: str
    measure: Callable[[Study], Iterator[Goodput | Load | Real]]


SECTIONS = ("goodput", "loads", "faults", "urgent", "real", "overhead", *TRIALS)


def tasks(plan: Plan, systems: Sequence[System], sections: Sequence[str]) -> Iterator[Task]:
    """All tasks under load, with all systems in one cell before the next."""
    if "goodput" in sections:
        for cell in plan.goodput:
            for system in systems:
                yield Task(system, "goodput", partial(Study.goodput, cell=cell))
    for section, places in (("loads", plan.loads), ("faults", plan.faults), ("urgent", plan.urgent)):
        if section in sections:
            for cell, load in places:
                for system in systems:
                    # Without limits there are no deadlines to give.
                    if section != "urgent" or system.name != UNLIMITED:
                        yield Task(system, section, partial(Study.load, section=section, cell=cell, load=load))
    if "real" in sections:
        libraries = [system for system in systems if system.environment is not None][:2]
        chosen = [system for system in systems if system in (SYSTEMS[OURS], SYSTEMS[GREEDY], *libraries)]
        for cell, load in plan.real:
            for system in chosen:
                yield Task(system, "real time", partial(Study.real, cell=cell, load=load))
