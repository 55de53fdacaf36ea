"""Runs of one file with one engine, with and without planning, in turns."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright import Engine, run
from batchwright.jobs.report import RunReport
from benchmarks.foresight.jobs import TokenLine, renamed


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a file."""

    name: str
    options: Mapping[str, Any]


@dataclass(slots=True)
class Timed:
    """The rounds of one way."""

    seconds: list[float]
    hit_rates: list[float]
    """Shares of the prompt tokens that were in the prefix cache."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def in_turns(engine: Engine, rounds: Sequence[Sequence[TokenLine]], ways: Sequence[Way]) -> dict[str, Timed]:
    """Run the lines of each round in every way, the first way first in one round and last in the next.

    Each way has its own prompts, as long as the others', so that none finds blocks of another.
    """
    timed = {way.name: Timed([], []) for way in ways}
    with tempfile.TemporaryDirectory(prefix="batchwright-foresight-") as folder:
        for number, lines in enumerate(rounds):
            for index, way in enumerate(ways if number % 2 == 0 else ways[::-1]):
                report = _run(engine, renamed(lines, number * len(ways) + index), Path(folder), way)
                timed[way.name].seconds.append(report.loop_seconds)
                timed[way.name].hit_rates.append(report.cached_share)
    return timed


def _run(engine: Engine, lines: Sequence[TokenLine], folder: Path, way: Way) -> RunReport:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line.body()) + "\n" for line in lines))
    report = run(source, folder / "out.jsonl", model=engine, overwrite=True, **way.options)
    if report.failed:
        raise RuntimeError(f"{report.failed} lines failed: {report.failures[0]}")
    return report
