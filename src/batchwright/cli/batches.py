"""`batchwright batches`: the batches at a provider."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from batchwright.cli.quantities import duration
from batchwright.cli.tables import print_table, when
from batchwright.errors import BatchwrightError, EndpointError, MissingExtra, RunFailed
from batchwright.inference.batches.provider import NO_SUCH_API
from batchwright.inference.endpoint_keys import find_key
from batchwright.wire.dialects import dialect_for

if TYPE_CHECKING:
    from batchwright.inference.batches.provider import BatchProvider, RemoteBatch

_T = TypeVar("_T")
_PROBLEMS = 10

app = typer.Typer(
    name="batches",
    help="List, show and cancel the batches at a provider, such as those of `run --via batch`.",
    no_args_is_help=True,
)

BackendOption = Annotated[
    str, typer.Option("--backend", metavar="URL", help="Address of the provider, as for `run`.", show_default=False)
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="NAME",
        help="Variable with the key (default: as for `run`).",
        show_default=False,
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option("--api-key-file", metavar="FILE", help="A file whose first line is the key.", show_default=False),
]
DialectOption = Annotated[
    str | None,
    typer.Option("--dialect", metavar="openai|anthropic", help="What it speaks, as for `run`.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each batch.")]


@app.command("list")
def list_batches(
    backend: BackendOption,
    dialect: DialectOption = None,
    api_key_env: KeyOption = None,
    api_key_file: KeyFileOption = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of batches to show, the newest.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show batches, the newest first."""
    batches = _with_provider(
        _Place(backend, dialect, api_key_env, api_key_file),
        lambda provider: provider.newest(limit),
        asks_for_all=True,
    )
    if as_json:
        _print_json(batches)
        return
    rows = [
        (
            batch.id,
            batch.status,
            f"{batch.done:,}/{batch.total:,}" if batch.total else "",
            f"{batch.failed:,}" if batch.failed else "",
            batch.endpoint or "",
            batch.model or "",
            when(batch.created_at),
            _left(batch),
            "yes" if batch.mark else "",
        )
        for batch in batches
    ]
    print_table(("id", "status", "done", "failed", "endpoint", "model", "created", "expires in", "of a run"), rows)


@app.command("show")
def show(
    batch_id: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.", show_default=False)],
    backend: BackendOption,
    dialect: DialectOption = None,
    api_key_env: KeyOption = None,
    api_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one batch, with its errors if it has any."""
    batch = _with_provider(
        _Place(backend, dialect, api_key_env, api_key_file), lambda provider: provider.show(batch_id)
    )
    if as_json:
        _print_json([batch])
        return
    rows = [
        ("status", batch.status),
        ("lines", f"{batch.total:,}: {batch.succeeded:,} succeeded, {batch.failed:,} failed"),
        ("endpoint", batch.endpoint or ""),
        ("model", batch.model or ""),
        ("input file", batch.input_file or ""),
        ("results", ", ".join(batch.files)),
        ("created", when(batch.created_at)),
        ("expires", when(batch.ends_by)),
        ("of a run, as", batch.mark or ""),
    ]
    print_table(("id", batch.id), [row for row in rows if row[1]])
    for problem in batch.problems[:_PROBLEMS]:
        where = "" if problem.line is None else f"line {problem.line}: "
        typer.echo(f"{where}{problem.message} ({problem.code})")
    if len(batch.problems) > _PROBLEMS:
        typer.echo(f"… and {len(batch.problems) - _PROBLEMS} more: see them with --json")


@app.command("cancel")
def cancel(
    batch_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="As `list` shows them.", show_default=False)],
    backend: BackendOption,
    dialect: DialectOption = None,
    api_key_env: KeyOption = None,
    api_key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel batches; finished lines are kept, and paid for.

    A run to which they belong takes these results, and submits the other lines again. At Fireworks, cancelling deletes:
    finished lines are paid for, and lost.
    """

    async def work(provider: BatchProvider) -> list[RemoteBatch]:
        cancelled = []
        for batch_id in batch_ids:
            try:
                cancelled.append(await provider.cancel(batch_id))
            except BatchwrightError as error:
                failed.append(f"{batch_id}: {error}")
        return cancelled

    failed: list[str] = []
    batches = _with_provider(_Place(backend, dialect, api_key_env, api_key_file), work)
    if as_json:
        _print_json(batches)
    else:
        for batch in batches:
            typer.echo(f"{batch.id}: {batch.status}")
    if failed:
        raise RunFailed("; ".join(failed))


@dataclass(frozen=True, slots=True)
class _Place:
    """What options say about a provider."""

    backend: str
    dialect: str | None
    api_key_env: str | None
    api_key_file: Path | None


def _with_provider(place: _Place, work: Callable[[BatchProvider], Awaitable[_T]], *, asks_for_all: bool = False) -> _T:
    """Do `work` with the provider. `asks_for_all`: it names no batch that the provider might not know."""
    try:
        from batchwright.inference.batches.opening import open_provider
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"an endpoint elsewhere needs {error.name}; install it: pip install 'batchwright[remote]'"
        ) from error

    async def main() -> _T:
        dialect = dialect_for(place.dialect, place.backend)
        key = find_key(place.backend, dialect, os.environ, variable=place.api_key_env, file=place.api_key_file)
        if key.warning is not None:
            typer.echo(f"warning: {key.warning}", err=True)
        provider = open_provider(place.backend, key, dialect=dialect)
        try:
            return await work(provider)
        except EndpointError as error:
            if error.status in NO_SUCH_API and (asks_for_all or error.is_no_such_path):
                raise RunFailed(
                    f"{place.backend} has no batch API (it answered {error.status}), so no batches lie there: "
                    "`batchwright run` has lines computed as requests, unless configured otherwise"
                ) from error
            raise
        finally:
            await provider.close()

    return asyncio.run(main())


def _print_json(batches: Sequence[RemoteBatch]) -> None:
    for batch in batches:
        typer.echo(msgspec.json.encode(batch).decode())


def _left(batch: RemoteBatch) -> str:
    if batch.ends_by is None or batch.ending is not None:
        return ""
    return duration(max(0.0, batch.ends_by - time.time()))
