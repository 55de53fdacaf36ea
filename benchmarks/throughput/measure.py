"""Rounds of a workload, system after system, and the figures from the times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.throughput.process import Worker, WorkerFailed
from benchmarks.throughput.systems import OURS, PRODUCTS
from benchmarks.throughput.workers.protocol import Job, Outcome
from benchmarks.throughput.workloads import Workload, find_workload


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our tokens/s over another's."""

    median: float
    """Ratio of our median to theirs."""
    low: float
    high: float
    """Least and greatest of the rounds, each with both systems in it."""


@dataclass(slots=True)
class Result:
    """One workload. `rates` are generated tokens/s of each round, by system; for the products the bound."""

    workload: Workload
    rates: dict[str, list[float]] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    """Share of the prompts whose first token is the same as batchwright's: all compute the same model."""

    def median(self, system: str) -> float | None:
        rates = self.rates.get(system)
        return statistics.median(rates) if rates else None

    def ratio(self, other: str) -> Ratio | None:
        """Ratio of batchwright to `other`; None if one of them was not measured."""
        ours, theirs = self.rates.get(OURS), self.rates.get(other)
        if not ours or not theirs:
            return None
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        return Ratio(statistics.median(ours) / statistics.median(theirs), min(pairs), max(pairs))


def measure(
    workload: Workload, workers: Mapping[str, Worker], rounds: int, vocab_size: int, say: Callable[[str], None]
) -> Result:
    """Warm every worker up, then run `rounds` rounds, in each every worker once, in the order given.

    Raises `WorkerFailed` if a worker fails, or generates other numbers of tokens than requested.
    """
    result = Result(workload, {system: [] for system in workers})
    for system, worker in workers.items():
        say(f"{workload.name}: warming up {system}")
        worker.run(workload.warm_up(vocab_size))
    for number in range(rounds):
        job = workload.job(number, vocab_size)
        firsts: dict[str, list[int]] = {}
        for system, worker in workers.items():
            outcome = worker.run(job)
            rate = _rate(system, outcome, job, workload)
            result.rates[system].append(rate)
            firsts[system] = [tokens[0] for tokens in outcome["tokens"]]
            say(f"{workload.name}, round {number + 1} of {rounds}: {system} {rate:,.0f} tokens/s")
        result.agreement = {system: _share_equal(firsts[OURS], its) for system, its in firsts.items() if its}
    return result


def _share_equal(one: list[int], other: list[int]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def tried(workers: Sequence[Worker], vocab_size: int, say: Callable[[str], None]) -> list[float]:
    """Tokens/s of each worker at 64 short sequences: the best of two rounds, after one to warm up."""
    workload = find_workload("uniform-64:16/64")
    best = [math.inf] * len(workers)
    for worker in workers:
        worker.run(workload.warm_up(vocab_size))
    for number in (-2, -3):  # the rounds from 0 on are those that are measured
        for index, worker in enumerate(workers):
            best[index] = min(best[index], worker.run(workload.job(number, vocab_size))["seconds"])
    rates = [workload.generated / seconds for seconds in best]
    for worker, rate in zip(workers, rates, strict=True):
        say(f"tried {worker.ready['settings']}: {rate:,.0f} tokens/s")
    return rates


def profile(workload: Workload, worker: Worker, vocab_size: int) -> dict[str, float]:
    """Seconds in each part of our steps over one round, and the number of `steps`."""
    worker.run(workload.warm_up(vocab_size))
    return worker.run(workload.job(0, vocab_size))["profile"]


def bounded(workload: Workload, worker: Worker, rounds: int, vocab_size: int) -> dict[str, float]:
    """The figures of the bound of the round whose share of it is the median one."""
    worker.run(workload.warm_up(vocab_size))
    found = [worker.run(workload.job(number, vocab_size))["profile"] for number in range(rounds)]
    return sorted(found, key=lambda each: each["bound"] / each["seconds"])[rounds // 2]


def _rate(system: str, outcome: Outcome, job: Job, workload: Workload) -> float:
    if system == PRODUCTS:
        return workload.rows / outcome["seconds"]
    if [len(tokens) for tokens in outcome["tokens"]] != job["outputs"]:
        raise WorkerFailed(f"{system} did not generate the numbers of tokens that it was asked to")
    return workload.generated / outcome["seconds"]
