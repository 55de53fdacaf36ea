"""The command: each task by both models in turns, their results, and the ratio of their times."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.harness.tasks import TASKS, write_tasks
from benchmarks.perplexity.texts import own_text
from benchmarks.throughput.report import machine, table

app = typer.Typer(add_completion=False)

_METRICS = {"endings": "acc_norm,none", "letters": "acc_norm,none", "perplexity": "word_perplexity,none"}


@dataclass(slots=True)
class Outcome:
    """Results of one model on one task."""

    seconds: list[float] = field(default_factory=list)
    result: float = 0.0
    answers: list[float] = field(default_factory=list)
    """The log-likelihoods, in the order of the questions."""


@app.command()
def evaluation(
    model: Annotated[str, typer.Option(help="Model.")] = DEFAULT_MODEL,
    questions: Annotated[int, typer.Option(min=8, help="Questions of each task; an eighth as many whole texts.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in turns.")] = 3,
    hf_batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once in the harness's own model.")] = 16,
    dtype: Annotated[str, typer.Option(help="Precision of both.")] = "float32",
    save: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the page here.")] = None,
) -> None:
    """Tasks of lm-evaluation-harness: its own `hf` model, and the engine. Needs `pip install lm-eval`."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from lm_eval.models.huggingface import HFLM

    from batchwright.lm_eval import Model

    folder = str(resolve(model, weights="values"))
    models = {
        "hf": HFLM(pretrained=folder, dtype=dtype, device="cpu", batch_size=hf_batch_size),
        "batchwright": Model(folder, dtype=dtype, prefix_caching=True),
    }
    before = os.getloadavg()[0]
    found = {(task, name): Outcome() for task in TASKS for name in models}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as home:
            # Different questions in every round, so that nothing is left in a cache from the previous one.
            write_tasks(Path(home), own_text(), questions, seed=number)
            for task, name in found:
                typer.echo(f"round {number + 1}: {task}, {name}", err=True)
                _measure(models[name], Path(home), task, found[task, name])
    host = machine()
    page = "\n\n".join(
        [
            "# Tasks of lm-evaluation-harness",
            f"Printed by `benchmarks/evaluation.py` on {host['date']}; {host['processor']}, {host['cores']} cores. "
            f"{model}, {dtype}, {questions} questions, {rounds} rounds in turns, the harness's own model with batches "
            f"of {hf_batch_size}; load average before it {before:.0f}, after it {os.getloadavg()[0]:.0f}. What is "
            "measured and how to repeat it: [benchmarks/README.md](../README.md#tasks-of-lm-evaluation-harness).",
            _table(found),
        ]
    )
    typer.echo(page)
    if save is not None:
        save.write_text(page + "\n", encoding="utf-8")


def _measure(model: Any, folder: Path, task: str, outcome: Outcome) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with _timed(model) as spent:
        found: Any = lm_eval.simple_evaluate(model=model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    outcome.seconds.append(sum(spent))
    outcome.result = found["results"][task][_METRICS[task]]
    outcome.answers = [_first(answer) for sample in found["samples"][task] for answer in sample["filtered_resps"]]


@contextmanager
def _timed(model: Any) -> Iterator[list[float]]:
    """Seconds of each call to the model: what the harness does before and after is the same for all."""
    spent: list[float] = []
    names = ("loglikelihood", "loglikelihood_rolling")

    def timed(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            answer = own(*arguments, **options)
            spent.append(time.perf_counter() - began)
            return answer

        return call

    for name in names:
        setattr(model, name, timed(getattr(model, name)))
    try:
        yield spent
    finally:
        for name in names:
            delattr(model, name)


def _first(answer: Any) -> float:
    return float(answer[0] if isinstance(answer, (tuple, list)) else answer)


def _table(found: dict[tuple[str, str], Outcome]) -> str:
    rows = []
    for task, what in TASKS.items():
        theirs, ours = found[task, "hf"], found[task, "batchwright"]
        ratios = [slow / fast for slow, fast in zip(theirs.seconds, ours.seconds, strict=True)]
        error = max(abs(one - other) for one, other in zip(theirs.answers, ours.answers, strict=True))
        rows.append(
            [
                f"{task}: {what}",
                f"{theirs.result:.4f}",
                f"{ours.result:.4f}",
                f"{error:.1e}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
            ]
        )
    head = ["task", "hf", "batchwright", "greatest difference of a log-likelihood", "times as fast"]
    return table(head, rows)
