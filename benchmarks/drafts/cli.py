"""The command: the last lines of each job, by themselves and after its other lines, in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from batchwright import Engine, InferenceRequest
from batchwright.engine_config import QuantizationName
from batchwright.models import DEFAULT_MODEL
from batchwright.request import Flow, Prompt
from benchmarks.drafts.prompts import LINES, jobs
from benchmarks.throughput.report import machine, table

_MEASURED = 16
"""Lines at the end of each job that are measured; the others have ended before."""
_AT_ONCE = (1, 4, 8)
_MAX_TOKENS = 160

app = typer.Typer(add_completion=False)


@dataclass(slots=True)
class Total:
    """Sums over some lines."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@app.command()
def drafting(
    model: Annotated[str, typer.Option(help="Model.")] = DEFAULT_MODEL,
    quantization: Annotated[
        QuantizationName | None, typer.Option(help="Precision of its weights, if not bfloat16.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="One more job: JSONL with a question in each line.")
    ] = None,
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the table here, as a Markdown page.")] = None,
) -> None:
    """Generated tokens/s of few sequences that guess from their own past, and from ended answers of the job, too."""
    try:
        chosen = jobs(questions)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows = []
    with Engine(
        model,
        dtype="bfloat16",
        device="cpu",
        quantization=quantization,
        kv_memory="2GiB",
        prefix_caching=False,  # the second of two turns would find the prompts in the cache
    ) as engine:
        for name, prompts in chosen.items():
            for at_once in _AT_ONCE:
                typer.echo(f"{name}, {at_once} at once", err=True)
                rows.append([name, str(at_once), *_cells(*_measure(engine, name, prompts, at_once))])
    page = _page(model, quantization, rows)
    print(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def _measure(engine: Engine, name: str, prompts: list[Prompt], at_once: int) -> tuple[Total, Total]:
    """Return what the last of `prompts` take by themselves, and as lines of a job whose other lines have ended."""
    alone, in_job = Total(), Total()
    job = Flow(f"{name}, {at_once}", "lines")  # not the owner of answers to the same prompts
    by_itself = Flow("itself", "itself")  # its own owner, for whom no answers are kept
    _generate(engine, prompts[:-_MEASURED], job, Total())
    for number, first in enumerate(range(len(prompts) - _MEASURED, len(prompts), at_once)):
        turns = [(alone, by_itself), (in_job, job)]
        for total, flow in turns if number % 2 else reversed(turns):
            _generate(engine, prompts[first : first + at_once], flow, total)
    return alone, in_job


def _generate(engine: Engine, prompts: list[Prompt], flow: Flow, total: Total) -> None:
    requests = [InferenceRequest(prompt, max_tokens=_MAX_TOKENS, temperature=0.0, flow=flow) for prompt in prompts]
    steps, began = engine.stats.steps, time.perf_counter()
    responses = engine.generate(requests)
    total.seconds += time.perf_counter() - began
    total.steps += engine.stats.steps - steps
    for response in responses:
        if response.error is not None:
            raise response.error
        total.tokens += len(response.token_ids)


def _cells(alone: Total, in_job: Total) -> list[str]:
    return [
        f"{alone.rate:,.0f}",
        f"{alone.tokens / alone.steps:.2f}",
        f"{in_job.rate:,.0f}",
        f"{in_job.tokens / in_job.steps:.2f}",
        f"{in_job.rate / alone.rate:.2f}",
    ]


def _page(model: str, quantization: str | None, rows: list[list[str]]) -> str:
    host = machine()
    head = ["job", "at once", "by themselves", "tokens a step", "in the job", "tokens a step", "ratio"]
    return "\n\n".join(
        [
            "# Guesses from ended answers",
            f"Generated tokens/s of the last {_MEASURED} of {LINES} lines of a job, some at once, greedy, up to "
            f"{_MAX_TOKENS} tokens each, in turns: by themselves, so that each guesses from its own past, and as lines "
            "of the job, so that it also guesses from the answers that have ended. Printed by "
            f"`benchmarks/drafting.py` on {host['date']}; {model}, {quantization or 'bfloat16'}; {host['processor']}, "
            f"{host['cores']} cores, Python {host['python']}. What is measured and how to repeat it: "
            "[benchmarks/README.md](../README.md#guesses-from-ended-answers).",
            table(head, rows),
        ]
    )
