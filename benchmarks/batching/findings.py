"""What was measured: the records that the tables and plots are made from, and how the seeds are put together."""

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
second with a fixed cost that a batch must be large to pay for, as an accelerator has."""
LENGTHS = {"fixed": "fixed", "lognormal": "log-normal", "azure": "Azure"}
"""Distributions of lengths, as tables name them."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t at 97.5%, for 1 degree of freedom and more."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Where systems are compared."""

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
    """By Student's t; of a single value, the interval is infinite."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean) or len(values) == 1:
        return Estimate(mean, math.inf)
    quantile = _T_95[min(len(values) - 1, len(_T_95)) - 1]
    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(len(values)))


def difference(one: Sequence[float], other: Sequence[float]) -> Estimate:
    """Of pairs: both had the same seeds."""
    return estimate([a - b for a, b in zip(one, other, strict=True)])


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rates of one system in one cell, as shares of the capacity, one for each seed."""

    system: str
    cell: Cell
    tuned: bool
    """With the best of its grid, found with another seed; else as it comes."""
    options: dict[str, Any]
    rates: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.rates)


@dataclass(frozen=True, slots=True)
class Load:
    """How one system, as it comes, fared in one cell at one load; one result for each seed."""

    system: str
    section: str
    """`loads`, `faults` or `urgent`."""
    cell: Cell
    load: float
    """Offered, as a share of the capacity."""
    results: list[Result]

    @property
    def in_time(self) -> list[float]:
        return [result["in_time"] for result in self.results]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.in_time)

    def quantile(self, share: str, of: str = "latencies") -> list[float]:
        """Seconds within which so many were answered, for each seed; infinite where fewer were. Empty for no jobs."""
        found = [{"latencies": r["latencies"], "urgent": r["urgent"], "bulk": r["bulk"]}[of] for r in self.results]
        if not all(found):
            return []
        return [math.inf if (seconds := each[share]) is None else seconds for each in found]


@dataclass(frozen=True, slots=True)
class Real:
    """The same run in virtual and in real time: the share in time for each seed."""

    system: str
    cell: Cell
    load: float
    virtual: list[float]
    real: list[float]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What one system costs: microseconds of processor time a request, one for each repeat."""

    system: str
    micros: list[float]
    callers: list[float]
    """Of the callers and the device alone; part of `micros`."""
    mean_size: float

    @property
    def median(self) -> float:
        return statistics.median(self.micros)


@dataclass(frozen=True, slots=True)
class Measured:
    """A system that took part."""

    version: str
    options: list[dict[str, Any]]
    """Its grid; the first is how it comes."""


@dataclass(slots=True)
class Findings:
    """All that was measured, so far."""

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
        """Once, however often it happens."""
        if text not in self.notes:
            self.notes.append(text)

    def extend(self, other: Findings) -> None:
        """Add what another run measured in other sections.

        Raises ValueError when its seeds or number of requests are others, or a section is in both.
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
        """Of its loads, those of one section."""
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
