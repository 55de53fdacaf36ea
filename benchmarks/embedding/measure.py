"""Rounds of a workload, system after system, and the figures from the times."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.embedding.systems import OURS, SENTENCE
from benchmarks.embedding.workers.protocol import Job, Outcome
from benchmarks.embedding.workloads import Workload
from benchmarks.throughput.measure import Ratio
from benchmarks.throughput.process import Worker, WorkerFailed

_TUNING_TEXTS = 200


@dataclass(slots=True)
class Result:
    """One workload in one precision."""

    workload: Workload
    dtype: str
    tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each round, by system."""
    difference: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Difference from the reference system's vectors: greatest of all components, and least cosine."""

    def rate(self, system: str) -> float:
        """Tokens/s, by the median."""
        return self.tokens / statistics.median(self.seconds[system])

    def ratio(self, other: str, ours: str = OURS) -> Ratio:
        """How many times as fast as `other`."""
        pairs = [theirs / own for own, theirs in zip(self.seconds[ours], self.seconds[other], strict=True)]
        medians = statistics.median(self.seconds[other]) / statistics.median(self.seconds[ours])
        return Ratio(medians, min(pairs), max(pairs))


def measure(
    workload: Workload,
    dtype: str,
    tokens: int,
    workers: Mapping[str, Worker],
    rounds: int,
    say: Callable[[str], None],
) -> Result:
    """Run every worker once to warm it up and to compare its vectors, then `rounds` rounds in turn.

    Raises `WorkerFailed` if a worker fails.
    """
    result = Result(workload, dtype, tokens, {system: [] for system in workers})
    with tempfile.TemporaryDirectory() as folder:
        vectors = {system: _vectors(worker, workload, Path(folder)) for system, worker in workers.items()}
    reference = SENTENCE if SENTENCE in vectors else OURS
    for system, its in vectors.items():
        result.difference[system] = compare(vectors[reference], its)
    for number in range(rounds):
        for system, worker in workers.items():
            seconds = run(worker, workload.texts)
            result.seconds[system].append(seconds)
            rate = tokens / seconds
            say(f"{workload.name}, {dtype}, round {number + 1} of {rounds}: {system} {rate:,.0f} tokens/s")
    return result


def fastest(workers: Sequence[Worker], texts: list[str], say: Callable[[str], None]) -> int:
    """Index of the worker that is fastest with the first texts: the best of two runs, after a warm-up."""
    best = [math.inf] * len(workers)
    for number in range(3):
        for index, worker in enumerate(workers):
            seconds = run(worker, texts[:_TUNING_TEXTS])
            if number:
                best[index] = min(best[index], seconds)
    for worker, seconds in zip(workers, best, strict=True):
        say(f"tried {worker.ready['settings']}: {seconds:.2f} s for {len(texts[:_TUNING_TEXTS])} texts")
    return best.index(min(best))


def run(worker: Worker, texts: list[str], vectors: str = "") -> float:
    """Seconds for the texts."""
    job: Job = {"texts": texts, "vectors": vectors}
    return cast(Outcome, worker.run(cast(Any, job)))["seconds"]


def compare(reference: npt.NDArray[Any], other: npt.NDArray[Any]) -> tuple[float, float]:
    """Greatest difference of a component, and least cosine of two vectors; both [n, dim]."""
    lengths = np.linalg.norm(reference, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.abs(reference - other).max()), float(((reference * other).sum(1) / lengths).min())


def _vectors(worker: Worker, workload: Workload, folder: Path) -> npt.NDArray[Any]:
    file = folder / "vectors.npy"
    run(worker, workload.texts, str(file))
    vectors: npt.NDArray[Any] = np.load(file)
    if len(vectors) != len(workload.texts) or not np.isfinite(vectors).all():
        raise WorkerFailed(f"{worker.ready['settings']}: the vectors are not one finite one for each text")
    return vectors
