"""`batchwright jobs`: durable batches without HTTP, in the store that the service uses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from batchwright.cli.job_views import Seen, print_batch, print_batches, print_json, waiting
from batchwright.cli.serve import PASSED_ON, WORK_HELP, work_command
from batchwright.cli.store_options import StoreFlags, open_local_files, settings_with, store_command, write_audit
from batchwright.durable_files import replacing
from batchwright.errors import Conflict, InputError
from batchwright.lines.batch_line import split_lines
from batchwright.service.access.api_keys import DEFAULT_TENANT as TENANT
from batchwright.wire.requests import ALIASES

if TYPE_CHECKING:
    from batchwright.service.batches.batch_service import BatchService
    from batchwright.store.records import BatchRecord

SOME_FAILED = 3
_READ_BYTES = 2**20
_LONGEST_LINE = 2**30
_PAGE_LINES = 256
_T = TypeVar("_T")

app = typer.Typer(
    name="jobs",
    help="Submit, watch and end durable batches. They are computed by `batchwright serve`, or by `jobs work`.",
    no_args_is_help=True,
)
app.command("work", help=WORK_HELP, context_settings=PASSED_ON, add_help_option=False)(work_command)

BatchArgument = Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it: batch_….", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, as the API answers it.")]


class _FirstLine(msgspec.Struct):
    """The one field of a batch line that is read before the file is uploaded."""

    url: str


@store_command(app, "submit")
def submit(
    flags: StoreFlags,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON Lines in the form of OpenAI's batch input.", show_default=False)
    ],
    endpoint: Annotated[
        str | None, typer.Option(help="Endpoint of all lines. Default: that of the first line.", show_default=False)
    ] = None,
    window: Annotated[str, typer.Option(help="Time within which the batch has to end: 24h, 30m, 7d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the batch; may be given several times.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch ends.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a batch from the lines of a file, and print its id.

    Exit status with --wait: 0 all lines succeeded, 3 some failed, 1 it did not complete.
    """
    pairs = _pairs(metadata or [])
    named = endpoint or _endpoint_of(file)
    target = ALIASES.get(named, named)

    async def work(jobs: BatchService) -> Seen:
        uploaded = await jobs.upload(TENANT, file.name, _chunks(file))
        batch = await jobs.create_batch(
            TENANT, input_file_id=uploaded.id, endpoint=target, completion_window=window, metadata=pairs
        )
        batch = await waiting(jobs, batch) if wait else batch
        return batch, (await jobs.foresee([batch]))[0]

    seen = _with_jobs(flags, work, create=True)
    batch = seen[0]
    write_audit(settings_with(flags), "batch.create", batch.id)
    if as_json:
        print_json(seen)
    elif wait:
        print_batch(seen)
    else:
        typer.echo(batch.id)
    if wait:
        raise typer.Exit(1 if batch.status != "completed" else SOME_FAILED if batch.counts.failed else 0)


@store_command(app, "list")
def list_batches(
    flags: StoreFlags,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of batches to show, the newest.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show batches, the newest first."""

    async def work(jobs: BatchService) -> list[Seen]:
        batches = await jobs.batches(TENANT, limit=limit)
        return [*zip(batches, await jobs.foresee(batches), strict=True)]

    batches = _with_jobs(flags, work)
    if as_json:
        print_json(*batches)
    else:
        print_batches(batches)


@store_command(app, "show")
def show(flags: StoreFlags, batch_id: BatchArgument, as_json: JsonOption = False) -> None:
    """Show one batch, with its errors if it has any."""
    _shown(flags, lambda jobs: jobs.batch(TENANT, batch_id), as_json)


@store_command(app, "cancel")
def cancel(flags: StoreFlags, batch_id: BatchArgument, as_json: JsonOption = False) -> None:
    """Cancel a batch; finished lines are kept."""
    _changed(flags, "cancel", lambda jobs: jobs.cancel(TENANT, batch_id), as_json)


@store_command(app, "pause")
def pause(flags: StoreFlags, batch_id: BatchArgument, as_json: JsonOption = False) -> None:
    """Start no further lines of a batch. Its window keeps running."""
    _changed(flags, "pause", lambda jobs: jobs.pause(TENANT, batch_id), as_json)


@store_command(app, "resume")
def resume(flags: StoreFlags, batch_id: BatchArgument, as_json: JsonOption = False) -> None:
    """Resume a paused batch."""
    _changed(flags, "resume", lambda jobs: jobs.resume(TENANT, batch_id), as_json)


@store_command(app, "retry")
def retry(
    flags: StoreFlags,
    batch_id: BatchArgument,
    window: Annotated[
        str | None, typer.Option(help="Time within which the new batch has to end. Default: as before.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a new batch from the lines that failed or were not computed in time."""
    _shown(flags, lambda jobs: jobs.retry(TENANT, batch_id, completion_window=window), as_json, "batch.retry")


@store_command(app, "adopt")
def adopt(flags: StoreFlags) -> None:
    """Declare, after a restore, that the database and the files of the data folder belong together.

    For a database and files that were put together on purpose, and do not recognize each other. Files that the database
    does not know stay in the data folder for 61 days, in case it is the wrong database.
    """
    settings = settings_with(flags)

    from batchwright.service.files.custody import Custody, blobs_of, database_of
    from batchwright.store import open_store, shown_url, store_exists

    named = database_of(settings.database, settings.data)
    if not store_exists(named):
        raise InputError(f"there is no store at {shown_url(named)}: see to --data, --database and --config")

    async def main() -> tuple[int, int]:
        async with open_store(named) as store:
            return await Custody(store, blobs_of(settings.data)).adopt()

    total, known = asyncio.run(main())
    write_audit(settings, "store.adopt", shown_url(named))
    typer.echo(f"they belong together from now on; of the {total} files in the folder the database knows {known}")


@store_command(app, "results")
def results(
    flags: StoreFlags,
    batch_id: BatchArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: standard output.")
    ] = None,
) -> None:
    """Print the results of a batch as JSON Lines, those with errors last.

    For a batch that has not ended: the results so far, in the order in which they finished.
    """

    async def work(jobs: BatchService) -> None:
        async with aclosing(_results(jobs, batch_id)) as pieces:
            if output is None:
                async for piece in pieces:
                    sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
                return
            with replacing(output) as file:
                async for piece in pieces:
                    file.write(piece)

    _with_jobs(flags, work)
    write_audit(settings_with(flags), "batch.results", batch_id)


async def _results(jobs: BatchService, batch_id: str) -> AsyncGenerator[bytes]:
    from batchwright.store.records import ENDED

    batch = await jobs.batch(TENANT, batch_id)
    if batch.status in ENDED:
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                _, pieces = await jobs.content(TENANT, file_id)
                async with aclosing(pieces):
                    async for piece in pieces:
                        yield piece
        return
    after = 0
    while page := await jobs.results(TENANT, batch_id, after=after, limit=_PAGE_LINES):
        yield b"".join(line.output + b"\n" for line in page if line.output is not None)
        after = page[-1].sequence or after


def _changed(
    flags: StoreFlags, name: str, change: Callable[[BatchService], Awaitable[BatchRecord]], as_json: bool
) -> None:
    """Show a batch after `change`. Raises `Conflict` when the batch had ended before, so that nothing was changed."""
    from batchwright.store.records import ENDED

    async def work(jobs: BatchService) -> BatchRecord:
        batch = await change(jobs)
        if batch.status in ENDED:
            raise Conflict(f"batch {batch.id} has ended (it is {batch.status}): there is nothing to {name}")
        return batch

    _shown(flags, work, as_json, f"batch.{name}")


def _shown(
    flags: StoreFlags, ask: Callable[[BatchService], Awaitable[BatchRecord]], as_json: bool, action: str | None = None
) -> None:
    """Show the batch that `ask` returns. `action`: what `ask` did to it, for the audit log; None: it was only read."""

    async def work(jobs: BatchService) -> Seen:
        batch = await ask(jobs)
        return batch, (await jobs.foresee([batch]))[0]

    seen = _with_jobs(flags, work)
    if action is not None:
        write_audit(settings_with(flags), action, seen[0].id)
    if as_json:
        print_json(seen)
    else:
        print_batch(seen)


def _with_jobs(flags: StoreFlags, work: Callable[[BatchService], Awaitable[_T]], *, create: bool = False) -> _T:
    """Return what `work` returns. `create`: create the store if there is none yet."""
    settings = settings_with(flags)

    from batchwright.service.batches.batch_service import BatchService
    from batchwright.service.settings import limits_of

    async def main() -> _T:
        async with open_local_files(settings, create=create) as (store, blobs):
            return await work(BatchService(store, blobs, limits=limits_of(settings)))

    return asyncio.run(main())


async def _chunks(path: Path) -> AsyncGenerator[bytes]:
    """Read a file, or standard input for `-`, on threads: a pipe may block."""
    file = sys.stdin.buffer if str(path) == "-" else await asyncio.to_thread(path.open, "rb")
    with file:
        while chunk := await asyncio.to_thread(file.read, _READ_BYTES):
            yield chunk


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals:
            raise typer.BadParameter(f"--metadata {each!r}: must be KEY=VALUE")
        pairs[key] = value
    return pairs


def _endpoint_of(path: Path) -> str:
    """Return the `url` of the first line that is not blank. Raises `InputError` when there is none."""
    if str(path) == "-":
        raise InputError("--endpoint: must be given when FILE is standard input")
    with path.open("rb") as file:
        lines = (content for _, _, content in split_lines(file, _LONGEST_LINE))
        first = next((line for line in lines if line is None or line.strip()), b"")
    if first == b"":
        raise InputError(f"{path}: the file is empty; give one with a batch line in it")
    try:
        return msgspec.json.decode(first or b"", type=_FirstLine).url
    except (ValueError, RecursionError):
        raise InputError(
            f"{path}: its first line is not a JSON object with a url, as batch lines are; prompts, text and tables are "
            "for `batchwright run`; with --endpoint the file is taken as it is, and each wrong line is reported"
        ) from None
