"""What is measured of each system, and in which workloads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.batching.device import Cost
from benchmarks.batching.goodput import GOAL, capacity, highest_rate
from benchmarks.batching.peers import Peer
from benchmarks.batching.worker import Result, Run
from benchmarks.batching.workload import Workload

COSTS = {
    "encoder": Cost(0.003, 0.00003),
    "accelerator": Cost(0.020, 0.00002),
}
"""Devices: the first as fitted to a real encoder on two cores (benchmarks/embeddings.py), the second with a fixed cost
that a batch must be large to pay for, as an accelerator has."""

LOADS = (0.1, 0.3, 0.5, 0.75, 0.9, 1.1)
"""Times the capacity."""
SEEDS = (1, 2, 3, 4, 5)
_TUNING_SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly."""

    devices: Sequence[str]
    seeds: Sequence[int] = SEEDS
    count: int = 3000
    """Requests in a run."""
    trace: Path | None = None

    @property
    def lengths(self) -> list[str]:
        return ["fixed", "lognormal", *(["azure"] if self.trace else [])]

    def goodput_cells(self) -> list[Workload]:
        """Where the highest rate is looked for."""
        cells = [Workload("poisson", lengths, slo) for lengths in self.lengths for slo in (2.0, 5.0, 10.0)]
        cells += [Workload("poisson", "lognormal", slo, limit_of="mean") for slo in (5.0, 10.0)]
        cells += [Workload("bursts", "lognormal", slo) for slo in (5.0, 10.0)]
        if self.trace:
            cells += [Workload("azure", "azure", slo) for slo in (5.0, 10.0)]
        return cells

    def load_cells(self) -> list[Workload]:
        """Where each load is looked at."""
        return [Workload("poisson", lengths, 5.0) for lengths in self.lengths]

    def fault_cells(self) -> list[Workload]:
        """Likewise, with callers that leave and requests that are poison."""
        return [Workload("poisson", lengths, 5.0, faults=True) for lengths in self.lengths]

    def urgent_cells(self) -> list[Workload]:
        """Interactive requests among bulk, without limits."""
        return [
            Workload("poisson", lengths, None, urgent=0.2, bulk=bulk)
            for bulk in ("dumps", "steady")
            for lengths in ("fixed", "lognormal")
        ]


@dataclass(slots=True)
class Goodput:
    """The highest rate of one system in one cell, as shares of the capacity."""

    system: str
    device: str
    workload: Workload
    options: dict[str, Any]
    rates: list[float]
    """One for each seed."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)


@dataclass(slots=True)
class Load:
    """How one system, as it comes, fared in one cell at one load; one result for each seed."""

    system: str
    device: str
    workload: Workload
    load: float
    results: list[Result]


@dataclass(slots=True)
class Findings:
    """All that was measured of one system."""

    system: str
    title: str
    version: str
    defaults: list[Goodput] = field(default_factory=list)
    tuned: list[Goodput] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class Study:
    """Measures one system by a plan."""

    def __init__(self, peer: Peer, plan: Plan) -> None:
        self._peer = peer
        self._plan = plan
        self.findings = Findings(peer.name, peer.title, peer.version)

    def goodput(self, device: str, workload: Workload) -> None:
        """The highest rates of a cell: of the system as it comes, and of the best settings of its grid."""
        first, *others = self._peer.options
        plan = self._plan
        default = [self._highest(device, workload, first, seed) for seed in plan.seeds]
        self.findings.defaults.append(Goodput(self._peer.name, device, workload, first, default))
        tuning = {
            i: self._highest(device, workload, options, _TUNING_SEED) for i, options in enumerate([first, *others])
        }
        best = max(tuning, key=lambda i: tuning[i])
        rates = default
        if best:
            rates = [self._highest(device, workload, self._peer.options[best], seed) for seed in plan.seeds]
        self.findings.tuned.append(Goodput(self._peer.name, device, workload, self._peer.options[best], rates))

    def loads(self, device: str, workload: Workload) -> None:
        """How the system, as it comes, fares at each load."""
        whole = capacity(COSTS[device], workload.lengths, self._plan.trace)
        for load in LOADS:
            results = [
                self._run(device, workload, self._peer.options[0], load * whole, seed) for seed in self._plan.seeds
            ]
            self.findings.loads.append(Load(self._peer.name, device, workload, load, results))

    def _highest(self, device: str, workload: Workload, options: dict[str, Any], seed: int) -> float:
        whole = capacity(COSTS[device], workload.lengths, self._plan.trace)

        def share(rate: float) -> float:
            return self._run(device, workload, options, rate, seed)["in_time"]

        return highest_rate(share, whole) / whole

    def _run(self, device: str, workload: Workload, options: dict[str, Any], rate: float, seed: int) -> Result:
        trace = self._plan.trace
        spec: Run = {
            "system": "",
            "options": options,
            "cost": asdict(COSTS[device]),
            "workload": asdict(workload),
            "rate": rate,
            "count": self._plan.count,
            "seed": seed,
            "trace": str(trace) if trace else None,
            "virtual": True,
        }
        return self._peer.run(spec)


__all__ = ["COSTS", "GOAL", "LOADS", "SEEDS", "Findings", "Goodput", "Load", "Plan", "Study"]
