"""The time that a plan predicts before a job against the time that it takes: unseen random jobs on the real engine.

The machine is as new: an empty folder for what runs keep, so that the first cost model is that of a probe. Some jobs
of other seeds come first, as they would where people work. Half of the jobs have answers of given lengths
(`ignore_eos`); the answers of the others end when they end, and the plan answers some of their lines for five seconds.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from batchwright import run
from batchwright.engine_config import EngineConfig
from batchwright.inference.loading import load_engine, measure_costs
from batchwright.jobs.planned_time import PlannedTime
from batchwright.models.cache import CACHE_VARIABLE, cache_dir
from benchmarks.planning.bounds import Drawn
from benchmarks.throughput.report import machine, table

_MODEL = "smollm2-135m"
_BAR = 0.08
_HELD = range(17, 20)
"""Jobs of 20 whose interval is to hold the time; all are too many for an interval of nine in ten."""
_SUBJECTS = ("the sea", "a cat that reads", "bread", "winter in a town", "how bridges stand", "an old clock", "rain")
_TASKS = (
    "Write a short story about {}.",
    "Explain {} to a child in a few words.",
    "List three facts about {}.",
    "Is {} beautiful? Answer with one word.",
    "Write a poem about {}.",
)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """One job."""

    words: str
    lines: int
    planned: PlannedTime
    seconds: float

    @property
    def error(self) -> float:
        return self.planned.seconds / self.seconds - 1.0

    @property
    def is_held(self) -> bool:
        return self.planned.between[0] <= self.seconds <= self.planned.between[1]


@app.command()
def times(
    jobs: Annotated[int, typer.Option(min=1, help="Unseen jobs.")] = 20,
    before: Annotated[int, typer.Option(min=0, help="Jobs that come before them.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long each takes on two cores.")] = 15.0,
    first: Annotated[int, typer.Option(help="Seed of the first job.")] = 1000,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Plan random jobs, then run them, and print how far the times are from what the plans predicted."""
    done = []
    with _as_new():
        with load_engine(_MODEL, EngineConfig()) as engine:
            measure_costs(engine)
        for number in range(before + jobs):
            measured = _measured(first + number, seconds)
            print(f"{first + number}: {'; '.join(_row(measured))}", flush=True)
            done.append(measured)
    page = _page(done[before:], before)
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


@contextmanager
def _as_new() -> Iterator[None]:
    """A cache that holds models and kernels, and nothing that runs have kept."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("models", "native", "rates"):
            if (cache_dir() / name).is_dir():
                (Path(folder) / name).symlink_to(cache_dir() / name)
        earlier = os.environ.get(CACHE_VARIABLE)
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(CACHE_VARIABLE)
            if earlier is not None:
                os.environ[CACHE_VARIABLE] = earlier


def _measured(seed: int, seconds: float) -> Measured:
    job = Drawn.of(seed, seconds)
    is_given = seed % 2 == 0 or job.form
    lines = [*job.requests()] if is_given else _open_lines(job)
    words = job.words if is_given else f"chats, up to {job.outputs[1]} out, {'greedy' if job.greedy else 'drawn'}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{seed}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        planned = run(path, None, model=_MODEL, max_num_seqs=job.places, dry_run=True, probe=True).planned_time
        report = run(path, Path(folder) / "output.jsonl", model=_MODEL, max_num_seqs=job.places)
    if planned is None:
        raise RuntimeError(f"nothing was predicted of job {seed}")
    return Measured(f"{words}, {job.places} places", len(lines), planned, report.loop_seconds)


def _open_lines(job: Drawn) -> list[dict[str, object]]:
    """Lines whose answers end when they end."""
    sampling = {"temperature": 0.0} if job.greedy else {"temperature": 0.8, "top_p": 0.95}
    task = _TASKS[job.seed // 2 % len(_TASKS)]
    return [
        {
            "messages": [{"role": "user", "content": f"{task.format(_SUBJECTS[number % len(_SUBJECTS)])} ({number})"}],
            "max_tokens": job.outputs[1],
            **sampling,
        }
        for number in range(job.lines)
    ]


def _page(done: Sequence[Measured], before: int) -> str:
    host = machine()
    median, held = statistics.median(abs(each.error) for each in done), sum(each.is_held for each in done)
    given = [abs(each.error) for each in done if each.planned.lengths_from == "lines"]
    meets_median, meets_held = median <= _BAR, held in _HELD or len(done) != 20
    of_given = f" Of jobs whose lines state their lengths: {statistics.median(given):.1%}." if given else ""
    return "\n\n".join(
        [
            "# Times predicted before a job",
            f"{len(done)} random jobs with {_MODEL}, after {before} others, on a machine of which nothing was known but"
            f" a probe. Printed by `benchmarks/planning.py --section times` on {host['date']}; {host['processor']},"
            f" Python {host['python']}. What is measured and how to repeat it: [benchmarks/README.md](../README.md).",
            f"Median error: **{median:.1%}** (at most {_BAR:.0%}): **{'met' if meets_median else 'not met'}**. The"
            f" interval of nine cases in ten held {held} of {len(done)}"
            f" ({_HELD.start} to {_HELD.stop - 1} of 20): **{'met' if meets_held else 'not met'}**.{of_given}",
            table(
                ["job", "lines", "predicted, s", "between", "took, s", "error", "held", "answers known from"],
                [_row(each) for each in sorted(done, key=lambda each: abs(each.error))],
            ),
        ]
    )


def _row(each: Measured) -> list[str]:
    least, most = each.planned.between
    return [
        each.words,
        f"{each.lines:,}",
        f"{each.planned.seconds:.1f}",
        f"{least:.1f} to {most:.1f}",
        f"{each.seconds:.1f}",
        f"{each.error:+.0%}",
        "yes" if each.is_held else "no",
        each.planned.lengths_from,
    ]


if __name__ == "__main__":
    app()
