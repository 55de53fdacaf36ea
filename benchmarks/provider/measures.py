"""What is read from a ledger: how much of what was allowed a client got, how often it was refused, what it paid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.provider.jobs import Job
from benchmarks.provider.ledger import REFUSED, Entry, Ledger, answered_by
from benchmarks.provider.limits import AT_RANDOM

_WINDOW = 10.0
"""Seconds over which a rate is averaged."""
_STEP = 0.5
_REACHED = 0.9


@dataclass(frozen=True, slots=True)
class Measures:
    """Figures of one run."""

    lines: int
    """Lines of the job."""
    answered: int
    """Lines whose answer was sent."""
    written: int
    """Lines whose answer is in the client's output."""
    share: float
    """Tokens of lines answered until `Job.until`, over those of the clairvoyant client by then: all of them."""
    makespan: float | None
    """Seconds until the last line was answered over the clairvoyant client's; None if some were not answered."""
    refused_per_thousand: float
    """Refusals by a limit per 1,000 requests, without those at random."""
    to_rate: float | None
    """Seconds until 90% of the clairvoyant client's rate of admissions; None: never."""
    paid_twice: int
    """Payments for lines whose answer had been sent before."""
    dollars: float
    outcomes: dict[str, int]
    """Requests by how they ended."""


def measure(job: Job, ledger: Ledger, written: int) -> Measures:
    """Measure a run by the provider's own record. `written`: answers in the client's output."""
    first = answered_by(ledger.entries)
    ends = [entry.ended or 0.0 for entry in first.values()]
    delivered = sum(entry.tokens for entry in first.values() if (entry.ended or 0.0) <= job.until)
    wanted = sum(job.tokens_of_lines)
    whole = len(first) == len(job.lines)
    refused = [entry for entry in ledger.refused if entry.limit != AT_RANDOM]
    return Measures(
        lines=len(job.lines),
        answered=len(first),
        written=written,
        share=delivered / wanted,
        makespan=max(ends) / job.plan.makespan if whole and ends else None,
        refused_per_thousand=1000 * len(refused) / max(len(ledger), 1),
        to_rate=_to_rate(job.plan.admitted, [entry for entry in ledger if entry.outcome != REFUSED]),
        paid_twice=len(ledger.paid_again()),
        dollars=ledger.dollars,
        outcomes=ledger.outcomes(),
    )


def _to_rate(planned: Sequence[float], admitted: Sequence[Entry]) -> float | None:
    """When the first window begins in which nearly as many were admitted as in the plan."""
    plan, own = sorted(planned), sorted(entry.arrived for entry in admitted)
    end = plan[-1] if plan else 0.0
    start = 0.0
    while start + _WINDOW <= max(end, _WINDOW):
        allowed, got = _within(plan, start), _within(own, start)
        if allowed and got >= _REACHED * allowed:
            return start
        start += _STEP
    return None


def _within(times: Sequence[float], start: float) -> int:
    return bisect_right(times, start + _WINDOW) - bisect_right(times, start - 1e-9)
