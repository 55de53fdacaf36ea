"""How batches are shown on a terminal, and to scripts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from batchwright.cli.progress import duration
from batchwright.cli.tables import print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchwright.service.batches.batch_progress import ProgressEstimate
    from batchwright.service.batches.batch_service import BatchService
    from batchwright.store.records import BatchRecord

_POLL = 0.5
_PATIENCE = 5.0
"""Seconds after which to say that nobody takes a batch up."""
_PROBLEMS = 10


def print_json(*batches: BatchRecord) -> None:
    """A line for each, as the API answers it."""
    from batchwright.service.batches.api_objects import BatchObject
    from batchwright.service.batches.batch_progress import BatchRates

    for batch in batches:
        typer.echo(BatchObject.of(batch, BatchRates().progress(batch, 0.0)).model_dump_json())


def print_batches(batches: Sequence[BatchRecord]) -> None:
    """A row for each."""
    rows = [
        (
            batch.id,
            _status(batch),
            f"{batch.counts.completed + batch.counts.failed:,}/{batch.counts.total:,}",
            f"{batch.counts.failed:,}" if batch.counts.failed else "",
            batch.endpoint,
            batch.model or "",
            _when(batch.created_at),
        )
        for batch in batches
    ]
    print_table(("id", "status", "done", "failed", "endpoint", "model", "created"), rows)


def print_batch(batch: BatchRecord) -> None:
    """All that there is to know of one."""
    counts, usage = batch.counts, batch.usage
    rows = [
        ("status", _status(batch)),
        ("lines", f"{counts.total:,}: {counts.completed:,} succeeded, {counts.failed:,} failed"),
        ("tokens", f"{usage.input_tokens:,} in ({usage.cached_tokens:,} cached), {usage.output_tokens:,} out"),
        ("endpoint", batch.endpoint),
        ("model", batch.model or ""),
        ("input file", batch.input_file_id),
        ("output file", batch.output_file_id or ""),
        ("error file", batch.error_file_id or ""),
        ("retry of", batch.parent_id or ""),
        ("created", _when(batch.created_at)),
        ("expires", _when(batch.expires_at)),
        ("ended", _when(batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at)),
        ("results removed", _when(batch.lines_removed_at) if counts.total else ""),
        *((f"metadata {key}", value) for key, value in batch.metadata.items()),
    ]
    print_table(("id", batch.id), [row for row in rows if row[1]])
    for problem in batch.errors[:_PROBLEMS]:
        where = "" if problem.line is None else f"line {problem.line}: "
        typer.echo(f"{where}{problem.message} ({problem.code})")
    if len(batch.errors) > _PROBLEMS:
        typer.echo(f"… and {len(batch.errors) - _PROBLEMS} more: see them with --json")


async def waiting(jobs: BatchService, batch: BatchRecord) -> BatchRecord:
    """The batch, once it has ended; meanwhile how far it is, on standard error."""
    from batchwright.store.records import ENDED

    waited = 0.0
    with _progress() as show:
        while True:
            batch = await jobs.batch(batch.tenant, batch.id)
            show(batch, jobs.progress(batch))
            if batch.status in ENDED:
                return batch
            if batch.status == "validating" and waited < _PATIENCE <= waited + _POLL:
                typer.echo(
                    f"nobody has taken {batch.id} up yet: start `batchwright serve` or `batchwright jobs work`",
                    err=True,
                )
            await asyncio.sleep(_POLL)
            waited += _POLL


@contextmanager
def _progress() -> Iterator[Callable[[BatchRecord, ProgressEstimate], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rest]}"))
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None, rest="")

        def show(batch: BatchRecord, progress: ProgressEstimate) -> None:
            done = progress.completed + progress.failed
            left = "" if progress.eta_seconds is None else f"{duration(progress.eta_seconds)} left"
            failed = f"{progress.failed:,} failed  " if progress.failed else ""
            bar.update(
                task, description=_status(batch), total=progress.total or None, completed=done, rest=failed + left
            )

        yield show


def _status(batch: BatchRecord) -> str:
    return (
        f"{batch.status} (paused)" if batch.paused and batch.status in ("validating", "in_progress") else batch.status
    )


def _when(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
