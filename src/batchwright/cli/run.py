"""`batchwright run`: answer a file of prompts."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli.flags import with_engine_flags
from batchwright.cli.run_views import progress_view, report_table
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

_INPUT, _MODEL = "Input and output", "Model"
_SAMPLING = "Sampling (for lines that do not say; with --backend the endpoint's own defaults)"


@with_engine_flags
def run_command(
    input: Annotated[  # noqa: A002 - the name in the help text
        str, typer.Argument(metavar="INPUT", help="A file, or - for standard input (JSON Lines unless --input-format).")
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="OUTPUT", help="A file, or - for standard output (cannot be resumed).",
            rich_help_panel=_INPUT,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help=f"A built-in name, a local folder, a GGUF file or a hub id (default: {DEFAULT_MODEL}); with --backend "
            "the name of one of its models (default: the first that it lists).",
            rich_help_panel=_MODEL, show_default=False,
        ),
    ] = None,
    embedding_model: Annotated[
        str | None, typer.Option(help="The model for lines for /v1/embeddings, such as minilm.", rich_help_panel=_MODEL)
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name that lines may give as their model, * for any; may be repeated. Without it, a line "
            "that names another model fails.",
            metavar="NAME", rich_help_panel=_MODEL,
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="An OpenAI-compatible endpoint that computes in place of this machine, such as "
            "http://10.0.0.5:8000/v1.",
            metavar="URL", rich_help_panel=_MODEL,
        ),
    ] = None,
    backend_api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the endpoint.", envvar="BATCHWRIGHT_BACKEND_API_KEY", rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    backend_concurrency: Annotated[
        int, typer.Option(min=1, help="Most requests under way at the endpoint.", rich_help_panel=_MODEL)
    ] = 64,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens to generate for a prompt (default: 256).", rich_help_panel=_SAMPLING),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy (default: 0.7).", rich_help_panel=_SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Smallest set of tokens whose probability reaches this (default: 1.0).", rich_help_panel=_SAMPLING
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same tokens, on one machine and dtype.", rich_help_panel=_SAMPLING)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Make each plain prompt the user message of a chat.", rich_help_panel=_INPUT),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: the system message before it.", rich_help_panel=_INPUT)
    ] = None,
    prompt_template: Annotated[
        str | None,
        typer.Option(
            help="For tables: a prompt with {column} in it; \\n and \\t are newline and tab, {{ and }} braces.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    input_format: Annotated[
        str | None,
        typer.Option(help="jsonl, txt, csv, tsv or parquet, whatever the extension says.", rich_help_panel=_INPUT),
    ] = None,
    max_line_bytes: Annotated[
        int, typer.Option(min=1, help="A longer line, or prompt of a table, is an error line.", rich_help_panel=_INPUT)
    ] = 2**20,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write OUTPUT at the end, in the order of INPUT.", rich_help_panel=_INPUT)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over: lose what OUTPUT holds.", rich_help_panel=_INPUT)
    ] = False,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the report as JSON too.", rich_help_panel=_INPUT)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress and no report, only errors.", rich_help_panel=_INPUT)
    ] = False,
    *,
    engine: EngineConfig,
) -> None:  # fmt: skip
    """See `HELP`."""
    from rich.console import Console

    from batchwright.jobs.run import RunInterrupted, run, sampling_defaults

    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    try:
        defaults = sampling_defaults(backend, **{name: value for name, value in given.items() if value is not None})
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(stderr=True)
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
            f"{not_found:,} of them name a model that is not here: to have them answered by {report.model} "
            "nevertheless, add --served-model-name NAME (or '*'), and --overwrite.",
            highlight=False,
        )


def _show_interruption(console: Console, interruption: RunInterrupted, quiet: bool) -> None:
    report = interruption.report
    if not quiet:
        console.print(report_table(report))
    if report.output == "-":
        message = "Interrupted. Standard output cannot be resumed: name a file with -o next time."
    else:
        arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
        command = shlex.join([Path(sys.argv[0]).name, *arguments])
        message = f"Interrupted: {report.done:,} of {report.total:,} lines are finished and kept. To go on: {command}"
    if interruption.kept_input is not None:
        message += f"\nwith the same input, which is kept in {interruption.kept_input}"
    console.print(message, highlight=False, markup=False, soft_wrap=True)
