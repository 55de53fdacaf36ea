"""What was measured: the records that the tables and plots are made from, and how the seeds are combined."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.batching.device import Cost
from benchmarks.batching.trials import Trial
from benchmarks.batching.worker import Result
from benchmarks.batching.workload import Workload

COSTS = {
    "encoder": Cost(0.0013, 0.000054),
    "accelerator": Cost(0.020, 0.00002),
}
"""Devices: the first as fitted to all-MiniLM-L6-v2 in float32 on two cores (`benchmarks/embeddings.py --fit`), the
second with a fixed cost that only a large batch pays for, like an accelerator's."""
LENGTHS = {"fixed": "fixed", "lognormal": "log-normal", "azure": "Azure"}
"""Distributions of lengths, as tables name them."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at 97.5%, for 1 degree of freedom and more."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A case in which systems are compared."""

    device: str
    """One of `COSTS`."""
    workload: Workload

    def __str__(self) -> str:
        return f"{self.device}, {self.title}"

    @property
    def title(self) -> str:
        """The workload in words: lengths, arrivals, limit, bulk."""
        workload = self.workload
        words = [LENGTHS[workload.lengths]]
        words += {"bursts": ["bursts"], "azure": ["Azure times"]}.get(workload.arrivals, [])
        if workload.slo is not None:
            words.append(f"{workload.slo:g}x{' mean' if workload.limit_of == 'mean' else ''}")
        if workload.urgent:
            words.append(f"bulk {workload.bulk}" if workload.bulk == "steady" else f"bulk in {workload.bulk}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and half the width of its 95% confidence interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate by Student's t; for a single value, the interval is infinite."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean) or len(values) == 1:
        return Estimate(mean, math.inf)
    quantile = _T_95[min(len(values) - 1, len(_T_95)) - 1]
    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(len(values)))


def difference(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """Estimate of the difference of pairs with the same seeds."""
    return estimate([a - b for a, b in zip(one, other, strict=True)])


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rates of one system in one cell, as shares of the capacity, one for each seed."""

    system: str
    cell: Cell
    tuned: bool
    """Whether it has the best settings of its grid, found with another seed; otherwise the defaults."""
    options: dict[str, Any]
    rates: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)


@dataclass(frozen=True, slots=True)
class Load:
    """Results of one system with default settings in one cell at one load, one for each seed."""

    system: str
    section: str
    """`loads`, `faults` or `urgent`."""
    cell: Cell
    load: float
    """Offered load, as a share of the capacity."""
    results: list[Result]

    @property
    def in_time(self) -> list[float]:
        return [result["in_time"] for result in self.results]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.in_time)

    def quantile(self, share: str, of: str = "latencies") -> list[float]:
        """Seconds within which that share was answered, for each seed; infinite if fewer were. Empty for no jobs."""
        found = [{"latencies": r["latencies"], "urgent": r["urgent"], "bulk": r["bulk"]}[of] for r in self.results]
        if not all(found):
            return []
        return [math.inf if (seconds := each[share]) is None else seconds for each in found]


@dataclass(frozen=True, slots=True)
class Real:
    """The same run in virtual and in real time: the share on time for each seed."""

    system: str
    cell: Cell
    load: float
    virtual: list[float]
    real: list[float]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Cost of one system: microseconds of processor time per request, one for each repeat."""

    system: str
    micros: list[float]
    callers: list[float]
    """Microseconds of the callers and the device alone; part of `micros`."""
    mean_size: float

    @property
    def median(self) -> float:
        return statistics.median(self.micros)


@dataclass(frozen=True, slots=True)
class Measured:
    """A system that took part."""

    version: str
    options: list[dict[str, Any]]
    """Its grid; the first entry is the default."""


@dataclass(slots=True)
class Findings:
    """Everything measured so far."""

    machine: dict[str, Any]
    seeds: list[int]
    count: int
    """Requests in a run."""
    complete: bool = False
    notes: list[str] = field(default_factory=list)
    """What was skipped or failed."""
    systems: dict[str, Measured] = field(default_factory=dict)
    goodput: list[Goodput] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    real: list[Real] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note once, however often it occurs."""
        if text not in self.notes:
            self.notes.append(text)

    def extend(self, other: Findings) -> None:
        """Add what another run measured in other sections.

        Raises ValueError if its seeds or number of requests differ, or if a section is in both.
        """
        if (self.seeds, self.count) != (other.seeds, other.count):
            raise ValueError("its seeds or its number of requests are not those of the file before")
        if both := self._sections() & other._sections():
            raise ValueError(f"{', '.join(sorted(both))} is in a file before too: leave one out")
        for text in other.notes:
            self.note(text)
        self.complete = self.complete and other.complete
        self.systems.update(other.systems)
        self.goodput += other.goodput
        self.loads += other.loads
        self.real += other.real
        self.overhead += other.overhead
        self.trials += other.trials

    def _sections(self) -> set[str]:
        named = {"goodput": self.goodput, "real": self.real, "overhead": self.overhead}
        sections = {each.section for each in self.loads} | {each.section for each in self.trials}
        return {name for name, records in named.items() if records} | sections

    def section(self, name: str) -> list[Load]:
        """Its loads in one section."""
        return [each for each in self.loads if each.section == name]

    def by_cell(self, *, tuned: bool) -> Iterator[tuple[Cell, dict[str, Goodput]]]:
        """The highest rates in each cell, by system."""
        chosen = [each for each in self.goodput if each.tuned == tuned]
        for cell in dict.fromkeys(each.cell for each in chosen):
            yield cell, {each.system: each for each in chosen if each.cell == cell}

    def by_load(self, section: str) -> Iterator[tuple[Cell, float, dict[str, Load]]]:
        """Each cell and load of a section, by system."""
        chosen = self.section(section)
        for cell, load in dict.fromkeys((each.cell, each.load) for each in chosen):
            yield cell, load, {each.system: each for each in chosen if (each.cell, each.load) == (cell, load)}
