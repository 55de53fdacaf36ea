"""`batchwright run`: answer a file of prompts."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli.flags import with_engine_flags
from batchwright.cli.run_views import progress_view, report_table
from batchwright.durable_files import is_special
from batchwright.engine_config import EngineConfig
from batchwright.errors import InvalidRequest, ModelNotFound, RunFailed
from batchwright.models import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.report import RunReport
    from batchwright.jobs.run import RunInterrupted

SOME_FAILED = 3
_PARAGRAPHS = (
    "Answer a file of prompts.",
    'INPUT is JSON Lines (.jsonl) of OpenAI batch lines, of {"prompt": ...} or of {"messages": [...]}; text with a '
    "prompt on each line (.txt); or a table (.csv, .tsv, .parquet) with --prompt-template. The text forms may be "
    "compressed (.gz). OUTPUT gets a line of JSON for each, in the form of OpenAI's batch output, as soon as it is "
    "finished.",
    "Stopped or killed at any moment, the same command goes on after the lines that are finished.",
    "Example: batchwright run prompts.jsonl -o results.jsonl --max-tokens 128",
    "Exit status: 0 all lines succeeded, 3 some failed (each has a line with its error), 2 bad usage, 130 stopped by "
    "Ctrl-C, 1 anything else.",
)
HELP = "\n\n".join(_PARAGRAPHS)

_io_option = partial(typer.Option, rich_help_panel="Input and output")
_model_option = partial(typer.Option, rich_help_panel="Model")
_sampling_option = partial(
    typer.Option, rich_help_panel="Sampling (for lines that do not say; with --backend the endpoint's own defaults)"
)
_OUTPUT = "A file, or - for standard output (cannot be resumed)."
_MODEL = (
    f"A built-in name, a local folder, a GGUF file or a hub id (default: {DEFAULT_MODEL}); with --backend the name of "
    "one of its models (default: the first that it lists)."
)
_SERVED = (
    "A further name that lines may give as their model, * for any; may be repeated. Without it, a line that names "
    "another model fails."
)
_BACKEND = "An OpenAI-compatible endpoint that computes in place of this machine, such as http://10.0.0.5:8000/v1."
_TOP_P = "Smallest set of tokens whose probability reaches this (default: 1.0)."
_TEMPLATE = "For tables: a prompt with {column} in it; \\n and \\t are newline and tab, {{ and }} braces."
_MAX_LINE_BYTES = "A longer line, or prompt of a table, is an error line."
_FORMAT = "jsonl, txt, csv, tsv or parquet, whatever the extension says."


@with_engine_flags
def run_command(
    input: Annotated[  # noqa: A002 - the name in the help text
        str, typer.Argument(metavar="INPUT", help="A file, or - for standard input (JSON Lines unless --input-format).")
    ],
    output: Annotated[str, _io_option("--output", "-o", metavar="OUTPUT", help=_OUTPUT)],
    model: Annotated[str | None, _model_option(help=_MODEL, show_default=False)] = None,
    embedding_model: Annotated[
        str | None, _model_option(help="The model for lines for /v1/embeddings, such as minilm.")
    ] = None,
    served_model_name: Annotated[list[str] | None, _model_option(help=_SERVED, metavar="NAME")] = None,
    backend: Annotated[str | None, _model_option(help=_BACKEND, metavar="URL")] = None,
    backend_api_key: Annotated[
        str | None,
        _model_option(help="API key of the endpoint.", envvar="BATCHWRIGHT_BACKEND_API_KEY", show_default=False),
    ] = None,
    backend_concurrency: Annotated[int, _model_option(min=1, help="Most requests under way at the endpoint.")] = 64,
    max_tokens: Annotated[
        int | None, _sampling_option(help="Most tokens to generate for a prompt (default: 256).")
    ] = None,
    temperature: Annotated[float | None, _sampling_option(help="0 is greedy (default: 0.7).")] = None,
    top_p: Annotated[float | None, _sampling_option(help=_TOP_P)] = None,
    seed: Annotated[int | None, _sampling_option(help="Same seed, same tokens, on one machine and dtype.")] = None,
    chat: Annotated[bool, _io_option("--chat", help="Make each plain prompt the user message of a chat.")] = False,
    system: Annotated[str | None, _io_option(help="With --chat: the system message before it.")] = None,
    prompt_template: Annotated[str | None, _io_option(help=_TEMPLATE)] = None,
    input_format: Annotated[str | None, _io_option(help=_FORMAT)] = None,
    max_line_bytes: Annotated[int, _io_option(min=1, help=_MAX_LINE_BYTES)] = 2**20,
    ordered: Annotated[bool, _io_option("--ordered", help="Write OUTPUT at the end, in the order of INPUT.")] = False,
    overwrite: Annotated[bool, _io_option("--overwrite", help="Start over: lose what OUTPUT holds.")] = False,
    report: Annotated[
        str | None, _io_option(metavar="FILE", help="Write the report as JSON too; - is standard output.")
    ] = None,
    quiet: Annotated[bool, _io_option("--quiet", "-q", help="No progress and no report, only errors.")] = False,
    *,
    engine: EngineConfig,
) -> None:
    """See `HELP`."""
    from rich.console import Console

    from batchwright.jobs.run import RunInterrupted, run, sampling_defaults

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    try:
        defaults = sampling_defaults(backend, {name: value for name, value in given.items() if value is not None})
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(stderr=True)
    with suppress(ModuleNotFoundError):  # stamina comes with the extra `remote`
        from stamina.instrumentation import set_on_retry_hooks

        # Without a hook, structlog prints each retry to standard output, among the results.
        set_on_retry_hooks([])
    with _terminable() as stop:
        try:
            with progress_view(console, quiet=quiet) as progress:
                result = run(
                    input,
                    output,
                    model=model,
                    embedding_model=embedding_model,
                    backend=backend,
                    backend_api_key=backend_api_key,
                    backend_concurrency=backend_concurrency,
                    served_model_names=served_model_name or (),
                    defaults=defaults,
                    input_format=input_format,
                    prompt_template=_unescaped(prompt_template),
                    chat=chat,
                    system=system,
                    ordered=ordered,
                    overwrite=overwrite,
                    max_line_bytes=max_line_bytes,
                    report=report,
                    progress=progress,
                    engine=engine,
                )
        except RunInterrupted as interruption:
            _show_interruption(console, interruption, quiet)
            raise typer.Exit(stop.exit_status) from None
        except OSError as error:
            where = f": {error.filename}" if error.filename else f", writing {output}"
            reason = f"{error.strerror or error}{where}"
            raise RunFailed(f"{reason}. Finished lines are kept: mend this, then run the same command again") from error
        except KeyboardInterrupt:
            if not quiet:
                console.print("Interrupted before anything was computed.", highlight=False)
            raise typer.Exit(stop.exit_status) from None
    if not quiet:
        _show(console, result)
    raise typer.Exit(SOME_FAILED if result.failed else 0)


def _unescaped(template: str | None) -> str | None:
    # A shell passes "\n" on as two characters, which are never meant literally.
    return None if template is None else template.replace("\\n", "\n").replace("\\t", "\t")


@dataclass
class _Stop:
    """Exit status of a run that was ended by a signal."""

    exit_status: int = 128 + signal.SIGINT


@contextmanager
def _terminable() -> Iterator[_Stop]:
    """Have SIGTERM end the run as Ctrl-C does; the result tells the exit status."""
    stop = _Stop()

    def terminate(number: int, frame: FrameType | None) -> None:
        stop.exit_status = 128 + number
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(console: Console, report: RunReport) -> None:
    if report.resumed == report.total and report.total:
        console.print(f"{report.output} is complete: there was nothing left to do.", highlight=False)
    console.print(report_table(report))
    if report.failed:
        console.print(
            f"{report.failed:,} lines failed: each has an error with a code and its line number in {report.output}.",
            highlight=False,
        )
    if not_found := report.failed_by_code.get(ModelNotFound.code):
        console.print(
            f"{not_found:,} of them name a model that is not here: to have them answered nevertheless, add "
            "--served-model-name NAME (or '*'), and --overwrite.",
            highlight=False,
        )


def _show_interruption(console: Console, interruption: RunInterrupted, quiet: bool) -> None:
    report = interruption.report
    if not quiet:
        console.print(report_table(report))
    if report.output == "-" or is_special(Path(report.output)):
        message = "Interrupted. What is no file cannot be resumed: name a file with -o next time."
    else:
        arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
        program = Path(sys.argv[0]).name
        command = shlex.join(
            [*(["python", "-m", "batchwright"] if program == "__main__.py" else [program]), *arguments]
        )
        message = f"Interrupted: {report.done:,} of {report.total:,} lines are finished and kept. To go on: {command}"
    if interruption.kept_input is not None:
        message += f"\nwith the same input, which is kept in {interruption.kept_input}"
    console.print(message, highlight=False, markup=False, soft_wrap=True)
