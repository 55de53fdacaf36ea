"""How close runs come to the bound that their reports state: random jobs on the real engine."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from batchwright import Engine, run
from batchwright.engine.machine_rates import machine_rates
from batchwright.jobs.report import RunReport
from batchwright.planning.bound import PARTS
from benchmarks.throughput.report import machine, table

_MODEL = "smollm2-135m"
_GOAL, _AIM = 0.8, 0.9
_PLACES = (4, 8, 16, 32, 64, 128, 256)
_WORDS = ["red", "blue", "north", "river", "seven", "paper", "green", "light", "stone", "water", "house", "early"]
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "kind": {"enum": ["town", "village", "capital"]},
    },
    "required": ["city", "people", "kind"],
    "additionalProperties": False,
}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A job, drawn by seed."""

    seed: int
    places: int
    lines: int
    prompts: tuple[int, int]
    """Words of the prompts, from the fewest to the most, without what they share."""
    outputs: tuple[int, int]
    shared: int
    """Words at the beginning of the prompts of a group."""
    groups: int
    greedy: bool
    form: bool
    """Whether answers are held to a schema."""

    @classmethod
    def of(cls, seed: int, seconds: float) -> Drawn:
        """Draw a job of about so many seconds on two cores."""
        draw = random.Random(seed)
        places = draw.choice(_PLACES)
        least = round(2 ** draw.uniform(2, 8))
        prompts = least, min(600, round(least * draw.choice((1, 2, 8))))
        shared, groups = (draw.randrange(64, 400), draw.choice((1, 4, 16))) if draw.random() < 0.4 else (0, 1)
        shortest = round(2 ** draw.uniform(2, 6.5))
        outputs = shortest, min(256, round(shortest * draw.choice((1, 2, 8))))
        form = draw.random() < 0.15
        # Rows at 2,000 a second, and steps that read the weights in 8 ms.
        answer = 40.0 if form else sum(outputs) / 2
        each = (sum(prompts) / 2 + answer) / 2000
        taken = max(each, answer * 8e-3 / places)
        begun = groups * shared / 2000
        lines = max(2, round(max(seconds - begun, seconds / 4) / taken))
        return cls(seed, places, lines, prompts, outputs, shared, groups, draw.random() < 0.6, form)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Lines of the input."""
        draw = random.Random(f"lines {self.seed}")
        prefixes = [" ".join(draw.choices(_WORDS, k=self.shared)) for _ in range(self.groups)]
        for number in range(self.lines):
            own = " ".join(draw.choices(_WORDS, k=draw.randint(*self.prompts)))
            # The groups one after another, as the planner of a job puts them.
            prompt = f"{prefixes[number * self.groups // self.lines]} {own} {number}"
            sampling = {"temperature": 0.0} if self.greedy else {"temperature": 0.8, "top_p": 0.95, "seed": number}
            line = {"prompt": prompt, "max_tokens": 96 if self.form else draw.randint(*self.outputs), **sampling}
            if self.form:
                line["response_format"] = {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}
            else:
                line["ignore_eos"] = True
            yield line

    @property
    def words(self) -> str:
        shared = f", {self.shared} shared by {self.groups}" if self.shared else ""
        answers = "schema" if self.form else "{} to {} out".format(*self.outputs)
        choice = "greedy" if self.greedy else "drawn"
        return f"{self.prompts[0]} to {self.prompts[1]} in{shared}, {answers}, {choice}"


@app.command()
def bounds(
    jobs: Annotated[int, typer.Option(min=1, help="Random jobs.")] = 50,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long each takes on two cores.")] = 4.0,
    first: Annotated[int, typer.Option(help="Seed of the first job.")] = 0,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Run random jobs, and print the share of its bound that each reached. Exits with 1 if one beat it."""
    with Engine(_MODEL) as engine:
        blocks = engine.core.scheduler.blocks
        machine_rates(engine.core.body, blocks.block_size, blocks.num_blocks, again=True)
    done: list[tuple[Drawn, RunReport]] = []
    for seed in range(first, first + jobs):
        job = Drawn.of(seed, seconds)
        done.append((job, _carried_out(job)))
        report = done[-1][1]
        print(f"{seed}: {report.share_of_bound:.0%} of {report.bound_seconds:.2f} s; {job.words}", flush=True)
    page = page_of(done)
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")
    if any((report.share_of_bound or 0.0) > 1.0 for _, report in done):
        raise typer.Exit(1)


def _carried_out(job: Drawn) -> RunReport:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in job.requests()), encoding="utf-8")
        report = run(path, Path(folder) / "output.jsonl", model=_MODEL, max_num_seqs=job.places)
    if report.share_of_bound is None:
        raise RuntimeError(f"job {job.seed} has no bound")
    return report


def page_of(done: Sequence[tuple[Drawn, RunReport]]) -> str:
    """A Markdown page."""
    host = machine()
    shares = [report.share_of_bound or 0.0 for _, report in done]
    beaten, median = sum(share > 1.0 for share in shares), statistics.median(shares)
    ordered = sorted(done, key=lambda each: each[1].share_of_bound or 0.0)
    worst, worst_report = ordered[0]
    verdict = "Aimed at and met" if median >= _AIM else "Met" if median >= _GOAL else "Missed"
    lost = {part: statistics.fmean((report.bound or {})["lost"][part] for _, report in done) for part in PARTS}
    return "\n\n".join(
        [
            "# How close runs come to their bounds",
            f"{len(done)} random jobs with {_MODEL}. Printed by `benchmarks/planning.py --section bounds` on"
            f" {host['date']}; {host['processor']}, Python {host['python']}. What is measured and how to repeat it:"
            " [benchmarks/README.md](../README.md).",
            f"Runs that beat their bound: **{beaten}**. Median share: **{median:.1%}** (goal {_GOAL:.0%}, aim"
            f" {_AIM:.0%}): **{verdict}.** Least {min(shares):.0%}, greatest {max(shares):.0%}. Lost on average:"
            f" {_parts(lost)}.",
            f"The worst, job {worst.seed}, spent its time on: {_parts((worst_report.bound or {})['time'])}.",
            table(
                ["job", "places", "lines", "tokens", "bound", "time", "share", "set by", "lost"],
                [_row(job, report) for job, report in ordered],
            ),
        ]
    )


def _row(job: Drawn, report: RunReport) -> list[str]:
    details = report.bound or {}
    return [
        str(job.seed),
        str(job.places),
        f"{job.lines:,}",
        job.words,
        f"{report.bound_seconds:.2f} s",
        f"{report.loop_seconds:.2f} s",
        f"{report.share_of_bound:.0%}",
        _set_by(details),
        _parts(details["lost"]),
    ]


def _set_by(details: Mapping[str, Any]) -> str:
    """What the time of products and that of attention were bounded by."""
    products = "steps" if details["steps_seconds"] > details["multiplying_seconds"] else "products"
    return f"{products}, {'keys' if details['keys_seconds'] > details['pairs_seconds'] else 'pairs'}"


def _parts(shares: Mapping[str, float]) -> str:
    named = sorted(((share, part) for part, share in shares.items() if share >= 0.005), reverse=True)
    return ", ".join(f"{share:.0%} {part}" for share, part in named) or "nothing"


if __name__ == "__main__":
    app()
