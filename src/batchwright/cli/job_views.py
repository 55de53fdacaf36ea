"""Batches as the command line shows them, on a terminal and to scripts."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, TypeAlias

import typer
from rich.console import Console

from batchwright.cli.quantities import duration
from batchwright.cli.tables import print_table, when

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchwright.service.batches.batch_progress import ProgressEstimate
    from batchwright.service.batches.batch_service import BatchService
    from batchwright.store.records import BatchRecord

_POLL = 0.5
_PATIENCE = 5.0
"""Seconds after which to say that no process has started on a batch."""
_PROBLEMS = 10


Seen: TypeAlias = "tuple[BatchRecord, ProgressEstimate]"
"""A batch, and how far it is."""


def print_json(*batches: Seen) -> None:
    """Print each batch as a line of JSON, in the form of the API."""
    from batchwright.service.batches.api_objects import BatchObject

    for batch, progress in batches:
        typer.echo(BatchObject.of(batch, progress).model_dump_json())


def print_batches(batches: Sequence[Seen]) -> None:
    """Print a table with a row for each batch."""
    rows = [
        (
            batch.id,
            _status(batch),
            f"{batch.counts.completed + batch.counts.failed:,}/{batch.counts.total:,}",
            f"{batch.counts.failed:,}" if batch.counts.failed else "",
            batch.endpoint,
            batch.model or "",
            when(batch.created_at),
            _left(progress),
        )
        for batch, progress in batches
    ]
    print_table(("id", "status", "done", "failed", "endpoint", "model", "created", "left"), rows)


def print_batch(seen: Seen) -> None:
    """Print everything that is known about a batch."""
    batch, progress = seen
    counts, usage = batch.counts, batch.usage
    rows = [
        ("status", _status(batch)),
        ("lines", f"{counts.total:,}: {counts.completed:,} succeeded, {counts.failed:,} failed"),
        ("left", _left(progress)),
        ("tokens", f"{usage.input_tokens:,} in ({usage.cached_tokens:,} cached), {usage.output_tokens:,} out"),
        ("endpoint", batch.endpoint),
        ("model", batch.model or ""),
        ("input file", batch.input_file_id),
        ("output file", batch.output_file_id or ""),
        ("error file", batch.error_file_id or ""),
        ("retry of", batch.parent_id or ""),
        ("created", when(batch.created_at)),
        ("expires", when(batch.expires_at)),
        ("ended", when(batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at)),
        ("results removed", when(batch.lines_removed_at) if counts.total else ""),
        *((f"metadata {key}", value) for key, value in batch.metadata.items()),
    ]
    print_table(("id", batch.id), [row for row in rows if row[1]])
    for problem in batch.errors[:_PROBLEMS]:
        where = "" if problem.line is None else f"line {problem.line}: "
        typer.echo(f"{where}{problem.message} ({problem.code})")
    if len(batch.errors) > _PROBLEMS:
        typer.echo(f"… and {len(batch.errors) - _PROBLEMS} more: see them with --json")


async def waiting(jobs: BatchService, batch: BatchRecord) -> BatchRecord:
    """Return the batch once it has ended; until then, show its progress on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from batchwright.store.records import ENDED

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rest]}"))
    waited = 0.0
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None, rest="")
        while True:
            batch = await jobs.batch(batch.tenant, batch.id)
            [progress] = await jobs.foresee([batch])
            total, done = progress.total or None, progress.completed + progress.failed
            left = f"{duration(progress.eta_seconds)} left" if progress.eta_seconds else ""
            failed = f"{progress.failed:,} failed  " if progress.failed else ""
            bar.update(task, description=_status(batch), total=total, completed=done, rest=failed + left)
            if batch.status in ENDED:
                return batch
            if batch.status == "validating" and waited < _PATIENCE <= waited + _POLL:
                hint = f"nobody has taken {batch.id} up yet: start `batchwright serve` or `batchwright jobs work`"
                typer.echo(hint, err=True)
            await asyncio.sleep(_POLL)
            waited += _POLL


def _left(progress: ProgressEstimate) -> str:
    return duration(progress.eta_seconds) if progress.eta_seconds else ""


def _status(batch: BatchRecord) -> str:
    paused = batch.paused and batch.status in ("validating", "in_progress")
    return f"{batch.status} (paused)" if paused else batch.status
