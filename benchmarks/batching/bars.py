"""What the figures say in sentences: which goals are met, and where ours is not the best. All computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.batching.findings import LENGTHS, Estimate, Findings, Load, difference
from benchmarks.batching.peers import GREEDY, OURS, REQUESTS, SORTING, UNLIMITED, title

REFERENCES = (GREEDY, SORTING)
_OWN = (OURS, UNLIMITED, REQUESTS)
_SHOWN = 6
"""Most places that a sentence names; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A goal, and where it is missed."""

    goal: str
    places: int
    missed: list[str]

    def __str__(self) -> str:
        if not self.missed:
            return f"{self.goal}: **met** ({self.places} of {self.places})."
        return f"{self.goal}: **not met** (missed in {len(self.missed)} of {self.places}): {_some(self.missed)}."


def bars(findings: Findings) -> list[Bar]:
    """Bars of everything that was measured; a goal without measurements is left out."""
    found = [_fixed(findings), _lengths(findings), deciles_bar(findings), _urgent(findings), *_overhead(findings)]
    found += [Bar(trial.goal, len(trial.rows), trial.missed) for trial in findings.trials]
    return [bar for bar in found if bar.places]


def _fixed(findings: Findings) -> Bar:
    missed, places = [], 0
    for cell, load, systems in findings.by_load("loads"):
        if cell.workload.lengths == "fixed" and {OURS, GREEDY} <= systems.keys():
            places += 1
            ours, greedy = systems[OURS].mean, systems[GREEDY].mean
            if ours < 0.95 * greedy:
                missed.append(f"{cell.device} {load:.0%} ({ours:.1%} against {greedy:.1%})")
    return Bar("Fixed lengths: share in time at least 0.95 times that of greedy, at every load", places, missed)


def _lengths(findings: Findings) -> Bar:
    goal = "Mixed lengths, Poisson, limits of 5x and 10x: goodput at least 1.5 times that of greedy and of sorting"
    missed, places = [], 0
    for cell, systems in findings.by_cell(tuned=False):
        workload = cell.workload
        usual = workload.arrivals == "poisson" and workload.limit_of == "own" and workload.slo in (5.0, 10.0)
        if usual and workload.lengths != "fixed" and {OURS, *REFERENCES} <= systems.keys():
            places += 1
            best = max(systems[name].mean for name in REFERENCES)
            if systems[OURS].mean < 1.5 * best:
                missed.append(f"{cell} ({systems[OURS].mean / best:.2f} times)")
    return Bar(goal, places, missed)


def deciles_bar(findings: Findings) -> Bar:
    """No tenth of the requests by length is served worse than by greedy, as far as the seeds can show."""
    missed, places = [], 0
    for cell, load, systems in findings.by_load("loads"):
        if cell.workload.lengths != "fixed" and {OURS, GREEDY} <= systems.keys():
            for decile, worse in enumerate(worse_deciles(systems[OURS], systems[GREEDY]), 1):
                places += 1
                if worse:
                    missed.append(f"{cell.device}, {LENGTHS[cell.workload.lengths]}, {load:.0%}, tenth {decile}")
    return Bar("No tenth by length served worse than by greedy beyond the confidence interval", places, missed)


def worse_deciles(ours: Load, other: Load) -> list[bool]:
    """For each tenth by length, whether the interval of the difference lies below zero."""
    pairs = zip(_by_decile(ours), _by_decile(other), strict=True)
    return [difference(one, another).high < 0 for one, another in pairs]


def _by_decile(load: Load) -> list[tuple[float, ...]]:
    return list(zip(*(result["deciles"] for result in load.results), strict=True))


def _urgent(findings: Findings) -> Bar:
    missed, places = [], 0
    for cell, load, systems in findings.by_load("urgent"):
        if {OURS, GREEDY} <= systems.keys():
            places += 1
            ratio = p99_ratio(systems[OURS], systems[GREEDY])
            if ratio > 0.5:
                missed.append(f"{cell}, {load:.0%} ({ratio:.2f} times)")
    return Bar("p99 of interactive requests among 80% bulk at most 0.5 times that of greedy", places, missed)


def p99_ratio(one: Load, other: Load) -> float:
    """Ratio of the mean p99 of the interactive requests."""
    return statistics.fmean(one.quantile("0.99", "urgent")) / statistics.fmean(other.quantile("0.99", "urgent"))


def _overhead(findings: Findings) -> Iterator[Bar]:
    costs = {each.system: each.median for each in findings.overhead}
    ways = [name for name in (OURS, REQUESTS) if name in costs]
    dear = [f"{title(name)} ({costs[name]:.1f})" for name in ways if costs[name] > 20]
    yield Bar("Overhead at most 20 µs of processor time a request", len(ways), dear)
    libraries = [name for name in costs if name not in (*_OWN, *REFERENCES)]
    if OURS in costs:
        lower = [f"{title(name)} ({costs[name]:.1f} against {costs[OURS]:.1f})" for name in libraries]
        lower = [text for text, name in zip(lower, libraries, strict=True) if costs[name] < costs[OURS]]
        yield Bar("Overhead not above that of any library", len(libraries), lower)


@dataclass(frozen=True, slots=True)
class Loss:
    """A case where another system is better than ours with default settings."""

    place: str
    size: float
    """The difference, as a share of the greater."""
    clear: bool
    """The confidence interval of the difference does not reach zero; of overheads, the repeats do not overlap."""


def losses(findings: Findings) -> list[str]:
    """Where another system is better than ours with default settings: one sentence per kind of figure, worst first."""
    found = {
        "Goodput, others as they come": _goodput_losses(findings, tuned=False),
        "Goodput, others tuned": _goodput_losses(findings, tuned=True),
        "Share in time": _load_losses(findings, "loads"),
        "Share in time with faults": _load_losses(findings, "faults"),
        "p99 of interactive requests": _urgent_losses(findings, "urgent"),
        "p99 of bulk requests": _urgent_losses(findings, "bulk"),
        "Overhead": _overhead_losses(findings),
    }
    return [text for kind, each in found.items() if (text := _sentence(kind, list(each)))]


def _sentence(kind: str, found: Sequence[Loss]) -> str:
    clear = sorted((loss for loss in found if loss.clear), key=lambda loss: -loss.size)
    text = f"{kind}: {len(clear)} clear"
    if clear:
        text += f": {_some([loss.place for loss in clear])}"
    if len(found) > len(clear):
        text += f"; {len(found) - len(clear)} not clear"
    return f"{text}." if found else ""


def _goodput_losses(findings: Findings, *, tuned: bool) -> Iterator[Loss]:
    default = {cell: systems[OURS] for cell, systems in findings.by_cell(tuned=False) if OURS in systems}
    for cell, systems in findings.by_cell(tuned=tuned):
        others = [each for name, each in systems.items() if name not in _OWN]
        if cell in default and others:
            best, ours = max(others, key=lambda each: each.mean), default[cell]
            place = f"{cell} ({title(best.system)} {best.mean:.2f} against {ours.mean:.2f})"
            yield from _loss(place, difference(best.rates, ours.rates), best.mean)


def _load_losses(findings: Findings, section: str) -> Iterator[Loss]:
    for cell, load, systems in findings.by_load(section):
        others = [each for name, each in systems.items() if name not in _OWN]
        if OURS in systems and others:
            best, ours = max(others, key=lambda each: each.mean), systems[OURS]
            figures = f"{title(best.system)} {best.mean:.1%} against {ours.mean:.1%}"
            place = f"{cell.device}, {LENGTHS[cell.workload.lengths]}, {load:.0%} ({figures})"
            yield from _loss(place, difference(best.in_time, ours.in_time), best.mean)


def _urgent_losses(findings: Findings, of: str) -> Iterator[Loss]:
    for cell, load, systems in findings.by_load("urgent"):
        p99 = {name: each.quantile("0.99", of) for name, each in systems.items()}
        if p99.keys() > {OURS}:
            ours = p99.pop(OURS)
            best = min(p99, key=lambda name: statistics.fmean(p99[name]))
            its, mean = statistics.fmean(p99[best]), statistics.fmean(ours)
            place = f"{cell}, {load:.0%} ({title(best)} {1e3 * its:.0f} ms against {1e3 * mean:.0f} ms)"
            yield from _loss(place, difference(ours, p99[best]), mean)


def _overhead_losses(findings: Findings) -> Iterator[Loss]:
    found = {each.system: each for each in findings.overhead}
    ours = found.get(OURS)
    for name, each in found.items():
        if ours is not None and name not in _OWN and each.median < ours.median:
            place = f"{title(name)} ({each.median:.1f} µs against {ours.median:.1f} µs)"
            yield Loss(place, 1 - each.median / ours.median, max(each.micros) < min(ours.micros))


def _loss(place: str, apart: Estimate, greater: float) -> Iterator[Loss]:
    """`apart`: how much better another is; NaN if neither answered enough."""
    if math.isinf(apart.mean) and apart.mean > 0:
        yield Loss(place, 1.0, True)
    elif apart.mean > 0:
        yield Loss(place, apart.mean / greater, apart.low > 0)


def _some(places: Sequence[str]) -> str:
    more = len(places) - _SHOWN
    return "; ".join(places[:_SHOWN]) + (f"; and {more} more, in the tables" if more > 0 else "")
