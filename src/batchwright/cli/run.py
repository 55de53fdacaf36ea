"""`batchwright run`: answer a file of prompts."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

from batchwright.cli.flags import refuse_key_flag, with_engine_flags, with_sampling_flags
from batchwright.cli.interrupts import terminable
from batchwright.cli.plan_views import show_plan
from batchwright.cli.progress_views import progress_view
from batchwright.cli.quantities import counted
from batchwright.cli.report_views import batches_left, failures_table, paid_so_far, report_table
from batchwright.cli.visible_text import visible
from batchwright.durable_files import is_special
from batchwright.engine_config import EngineConfig
from batchwright.errors import InputError, InvalidRequest, ModelNotFound, RunFailed
from batchwright.inference.endpoint_keys import OWN_VARIABLE, EndpointKey, find_key
from batchwright.models import DEFAULT_MODEL
from batchwright.pricing.bounds import NO_ANSWER_BOUND
from batchwright.wire.dialects import dialect_for

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.failures import Failure
    from batchwright.jobs.job_run import RunInterrupted
    from batchwright.jobs.report import RunReport

SOME_FAILED = 3
_PARAGRAPHS = (
    "Answer files of prompts.",
    'INPUT is JSON Lines (.jsonl) of OpenAI batch lines, of {"prompt": ...} or of {"messages": [...]}; the same as one '
    "JSON array (.json); text with a prompt on each line (.txt); or a table (.csv, .tsv, .parquet, .arrow, and JSON "
    "objects of any fields) with --prompt-template. Several files, patterns ('data/*.csv') and folders are one input. "
    "The text forms may be compressed (.gz, .zst). Files may be elsewhere: s3://, gs://, az://, hf://, https://.",
    "The name of OUTPUT says what it is: .csv, .tsv and .parquet get the columns of the input and the answers, at the "
    "end and in the order of the input, as .jsonl, .jsonl.gz and .jsonl.zst do for tables. For other inputs, .jsonl "
    "gets a line in the form of OpenAI's batch output for each, as soon as it is finished. At an address such as "
    "s3://b/out.jsonl it is a folder of parts, as is any other output whose name ends in /.",
    "If a run is stopped or killed at any moment, the same command continues after the finished lines, and also "
    "answers lines that were appended to INPUT since.",
    "Example: batchwright run reviews.csv -o answers.csv --chat --prompt-template 'Is this review good? {review}'",
    "Exit status: 0 all lines succeeded, 3 some failed (each has a line with its error), 2 bad usage, 130 stopped by "
    "Ctrl-C, 1 anything else.",
)
HELP = "\n\n".join(_PARAGRAPHS)

io_option = partial(typer.Option, rich_help_panel="Input and output")
_model_option = partial(typer.Option, rich_help_panel="Model")
_OUTPUT = "A file, an address, or - for standard output (result lines; cannot be resumed)."
_MODEL = (
    f"A built-in name, a local folder, a GGUF file or a hub id (default: {DEFAULT_MODEL}); with --backend the name of "
    "one of its models (default: the first that it lists)."
)
_CLASSIFIER = (
    "A model for lines for /v1/rerank and /v1/score, which cross-encoders answer, and /classify: a folder or hub id; "
    "may be repeated."
)
_EMBEDDING = (
    "The model for lines for /v1/embeddings, and for /v1/rerank and /v1/score without a cross-encoder, such as minilm."
)
_SERVED = (
    "A further name that lines may give as their model, * for any; may be repeated. Without it, a line that names "
    "another model fails."
)
_REPLICAS = (
    "Compute in this many processes, each with the whole model on its own GPU or cores; auto: one for each "
    "GPU, else for each NUMA node (default: in this process)."
)
_RAY = (
    "Compute on a Ray cluster: auto (this machine's), local (starts one here), host:port or ray://host:port; in as "
    "many actors, each with the whole model, as --replicas says (default: 1)."
)
_RESOURCES = (
    "With --ray: what each replica takes of its node, as JSON: num_cpus, num_gpus, memory, accelerator_type, resources "
    "(default: one CPU)."
)
_BACKEND = "An endpoint that computes in place of this machine, such as http://10.0.0.5:8000/v1."
_DIALECT = "What the endpoint speaks (default: anthropic for api.anthropic.com, else openai)."
_KEY_ENV = (
    f"The environment variable with its API key (default: {OWN_VARIABLE}, else the provider's own, such as "
    "OPENAI_API_KEY or ANTHROPIC_API_KEY)."
)
_KEY_FILE = "A file whose first line is its API key."
_ALSO = (
    "A further endpoint that takes lines by its free limits, and the variable with its key: "
    "'https://host/v1 OTHER_KEY'; it may be the same address with another key. May be repeated."
)
_CONCURRENCY = "Concurrent requests to the endpoint (default: as many as give the most throughput, found as it runs)."
_RPM = "The endpoint's limit of requests a minute, if you know it; otherwise it is read from answers, or found."
_TPM = "Its limit of tokens a minute, of prompts and answers, likewise."
_NO_DEDUPE = "Compute identical requests each time, instead of once for all of them."
_NO_PLAN = (
    "Start lines in the order of the input. Otherwise, lines whose prompts begin alike (with --backend, in at least "
    "4 KiB) are started together, and a model here starts those whose answers are sure to be short last."
)
_BUDGET = (
    "With --backend: dollars that the job may cost, over all its runs. What requests may cost is reserved before they "
    "are sent. When it is spent, the same command with a larger budget continues."
)
_PRICE = (
    "With --backend: dollars per million tokens, input=2.50,cached=1.25,output=10.00 (also cache_write, "
    "cache_write_1h, and batch=0.5, the fraction that batches cost), or the PROVIDER/MODEL of published prices "
    "(default: those of the endpoint's address)."
)
_PRICES = "With --backend: such prices by model, in TOML ([gpt-4o] input = 2.50 ...) or JSON."
_VIA = (
    "How the endpoint computes: as requests; in the provider's own batches, mostly at half the price; or in batches as "
    "far as --deadline allows."
)
_DEADLINE = "Time within which all lines must be done, such as 6h; counted from the first start of the job."
_WINDOW = "Completion window of the provider's batches."
_TEMPLATE = (
    "For tables: a prompt with {column} in it; \\n and \\t are newline and tab, {{ and }} braces; @FILE reads "
    "it from a file (default: '{prompt}')."
)
_SYSTEM_TEMPLATE = "For tables: a system message with {column} in it, which makes a chat."
_MESSAGES_TEMPLATE = (
    'For tables: the whole chat as JSON, in Jinja: \'[{"role": "user", "content": {{ column | tojson }}}]\'.'
)
_PROBE = (
    "For a dry run, to say how long the job takes: load the model and measure its steps, if none were measured on this "
    "machine, and answer some lines, if no run shows how long answers to such lines are; each for some seconds."
)
_REORDER = (
    "Where several lines of the prompt template that name columns follow one another, put them in the order in which "
    "rows share the most: what is shared is computed once. It changes the prompts."
)
_RETRY = "Try failed lines of earlier runs again: those whose error may be temporary; with 'all', all."
_RETRY_INVALID = (
    "Ask a line again, at most N times, if its answer should be JSON and is not: with twice the tokens and the next "
    "seed."
)
_MAX_LINE_BYTES = "A longer line, or prompt of a table, is an error line."
_FORMAT = "jsonl, json, txt, csv, tsv, parquet or arrow, whatever the extension says."


class RunCommand(TyperCommand):
    """The command, with an option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click's `Command`."""
        given = [*args]
        refuse_key_flag(given)
        for index, argument in enumerate(given):
            if argument == "--retry-failed":
                is_all = given[index + 1 : index + 2] == ["all"]
                given[index : index + 1 + is_all] = [f"--retry-failed={'all' if is_all else 'passing'}"]
        return super().parse_args(ctx, given)


@with_engine_flags
@with_sampling_flags
def run_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Files, addresses, or - for standard input (JSON Lines unless --input-format). A path that is given "
            "twice, as by itself and by a pattern, is read once.",
        ),
    ],
    output: Annotated[str | None, io_option("--output", "-o", metavar="OUTPUT", help=_OUTPUT)] = None,
    model: Annotated[str | None, _model_option(help=_MODEL, show_default=False)] = None,
    embedding_model: Annotated[str | None, _model_option(help=_EMBEDDING)] = None,
    classifier: Annotated[list[str] | None, _model_option(help=_CLASSIFIER, metavar="NAME", show_default=False)] = None,
    served_model_name: Annotated[list[str] | None, _model_option(help=_SERVED, metavar="NAME")] = None,
    replicas: Annotated[str | None, _model_option(help=_REPLICAS, metavar="N|auto", show_default=False)] = None,
    ray: Annotated[str | None, _model_option(help=_RAY, metavar="ADDRESS", show_default=False)] = None,
    resources: Annotated[str | None, _model_option(help=_RESOURCES, metavar="JSON", show_default=False)] = None,
    backend: Annotated[str | None, _model_option(help=_BACKEND, metavar="URL")] = None,
    dialect: Annotated[str | None, _model_option(help=_DIALECT, metavar="openai|anthropic", show_default=False)] = None,
    api_key_env: Annotated[str | None, _model_option(help=_KEY_ENV, metavar="NAME", show_default=False)] = None,
    api_key_file: Annotated[Path | None, _model_option(help=_KEY_FILE, metavar="FILE", show_default=False)] = None,
    also: Annotated[list[str] | None, _model_option(help=_ALSO, metavar="URL [KEY_ENV]", show_default=False)] = None,
    backend_concurrency: Annotated[int | None, _model_option(min=1, show_default=False, help=_CONCURRENCY)] = None,
    rpm: Annotated[float | None, _model_option(metavar="N", help=_RPM)] = None,
    tpm: Annotated[float | None, _model_option(metavar="N", help=_TPM)] = None,
    no_dedupe: Annotated[bool, _model_option("--no-dedupe", help=_NO_DEDUPE)] = False,
    no_plan: Annotated[bool, _model_option("--no-plan", help=_NO_PLAN)] = False,
    budget: Annotated[str | None, _model_option(metavar="DOLLARS", help=_BUDGET)] = None,
    price: Annotated[str | None, _model_option(metavar="PRICES", help=_PRICE)] = None,
    prices: Annotated[str | None, _model_option(metavar="FILE", help=_PRICES)] = None,
    cost: Annotated[
        bool,
        _model_option(
            "--cost", help="With --backend: add its cost in dollars to the usage of each answer, or as a column."
        ),
    ] = False,
    via: Annotated[str, _model_option(metavar="live|batch|auto", help=_VIA)] = "live",
    deadline: Annotated[str | None, _model_option(metavar="DURATION", help=_DEADLINE)] = None,
    batch_window: Annotated[str, _model_option(metavar="DURATION", help=_WINDOW)] = "24h",
    prompt_template: Annotated[str | None, io_option(help=_TEMPLATE, show_default=False)] = None,
    system_template: Annotated[str | None, io_option(help=_SYSTEM_TEMPLATE)] = None,
    messages_template: Annotated[str | None, io_option(help=_MESSAGES_TEMPLATE)] = None,
    reorder_fields: Annotated[bool, io_option("--reorder-fields", help=_REORDER)] = False,
    chat: Annotated[bool, io_option("--chat", help="Make each plain prompt the user message of a chat.")] = False,
    system: Annotated[str | None, io_option(help="With --chat: the system message before it.")] = None,
    limit: Annotated[int | None, io_option(min=1, help="Answer only the first N lines; raise it later.")] = None,
    sample: Annotated[int | None, io_option(min=1, help="Answer only this many lines, drawn by --seed.")] = None,
    dry_run: Annotated[bool, io_option("--dry-run", help="Show what would be computed, and compute nothing.")] = False,
    probe: Annotated[bool, io_option("--probe/--no-probe", help=_PROBE)] = False,
    input_format: Annotated[str | None, io_option(help=_FORMAT)] = None,
    max_line_bytes: Annotated[int, io_option(min=1, help=_MAX_LINE_BYTES)] = 2**20,
    id_column: Annotated[str | None, io_option(help="For tables: the column with the ids of rows.")] = None,
    keep: Annotated[
        str | None, io_option(metavar="A,B,...", help="For tables: columns of the input to keep (default: all).")
    ] = None,
    output_column: Annotated[str, io_option(help="For tables: the column of the answers.")] = "answer",
    ordered: Annotated[bool, io_option("--ordered", help="Write OUTPUT at the end, in the order of INPUT.")] = False,
    overwrite: Annotated[bool, io_option("--overwrite", help="Start over, and lose what OUTPUT holds.")] = False,
    retry_failed: Annotated[str | None, io_option(metavar="[all]", help=_RETRY)] = None,
    retry_invalid: Annotated[int, io_option(min=0, metavar="N", help=_RETRY_INVALID)] = 0,
    report: Annotated[
        str | None, io_option(metavar="FILE", help="Write the report as JSON too; - is standard output.")
    ] = None,
    report_html: Annotated[str | None, io_option(metavar="FILE", help="Write a page of plots of the run too.")] = None,
    quiet: Annotated[bool, io_option("--quiet", "-q", help="No progress and no report, only errors.")] = False,
    *,
    engine: EngineConfig,
    sampling: dict[str, Any],
) -> None:
    """See `HELP`."""
    from rich.console import Console

    from batchwright.jobs.job_run import BudgetSpent, RunEnded, RunInterrupted
    from batchwright.jobs.run import run, sampling_defaults

    if output is None and not dry_run:
        raise InputError("name the output with --output (-o): results.jsonl, or a table such as answers.csv")
    try:
        defaults = sampling_defaults(backend, sampling)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(stderr=True)
    key = _key(console, backend, dialect, api_key_env, api_key_file)
    with suppress(ModuleNotFoundError):  # stamina comes with the extra `remote`
        from stamina.instrumentation import set_on_retry_hooks

        # Without a hook, structlog prints each retry to standard output, among the results.
        set_on_retry_hooks([])
    with terminable() as stop:
        try:
            with progress_view(console, quiet=quiet) as progress:
                result = run(
                    inputs,
                    output,
                    model=model,
                    embedding_model=embedding_model,
                    classifiers=classifier or (),
                    backend=backend,
                    backend_api_key=key,
                    backend_dialect=dialect,
                    also=[_also(each, dialect) for each in also or ()],
                    backend_concurrency=backend_concurrency,
                    rpm=rpm,
                    tpm=tpm,
                    replicas=cast("Any", replicas),
                    ray=ray,
                    resources=resources,
                    served_model_names=served_model_name or (),
                    dedupe=not no_dedupe,
                    planned=not no_plan,
                    budget=budget,
                    price=price,
                    prices=prices,
                    cost=cost,
                    via=cast("Any", via),
                    deadline=deadline,
                    batch_window=batch_window,
                    defaults=defaults,
                    input_format=input_format,
                    prompt_template=_template(prompt_template),
                    system_template=_template(system_template),
                    messages_template=_template(messages_template, escapes=False),
                    reorder_fields=reorder_fields,
                    chat=chat,
                    system=system,
                    id_column=id_column,
                    keep=None if keep is None else [name.strip() for name in keep.split(",")],
                    output_column=output_column,
                    limit=limit,
                    sample=sample,
                    sample_seed=sampling.get("seed", 0),
                    retry_failed=cast("Any", retry_failed or False),
                    retry_invalid=retry_invalid,
                    ordered=ordered,
                    overwrite=overwrite,
                    max_line_bytes=max_line_bytes,
                    dry_run=dry_run,
                    probe=probe,
                    report=report,
                    report_html=report_html,
                    progress=progress,
                    engine=engine,
                )
        except RunInterrupted as interruption:
            _show_interruption(console, interruption, quiet)
            raise typer.Exit(stop.exit_status) from None
        except BudgetSpent as end:
            _show(console, end.report, quiet=quiet)
            raise
        except RunEnded as end:
            _show(console, end.report, quiet=quiet or not _has_begun(end.report))
            raise
        except BrokenPipeError:
            raise  # whoever reads the output has had enough, as in `… | head`: click ends quietly
        except OSError as error:
            where = f": {error.filename}" if error.filename else f", writing {output}"
            reason = f"{error.strerror or error}{where}"
            raise RunFailed(f"{reason}. Finished lines are kept: mend this, then run the same command again") from error
        except KeyboardInterrupt:
            if not quiet:
                console.print("Interrupted before anything was computed.", highlight=False)
            raise typer.Exit(stop.exit_status) from None
    if not quiet:
        if dry_run:
            # What the command is for goes to standard output, unless the JSON does.
            show_plan(
                console if report == "-" else Console(),
                result,
                is_elsewhere=backend is not None,
                model=model,
                budget=None if budget is None else float(budget),
                via=via,
            )
        else:
            _show(console, result)
    raise typer.Exit(SOME_FAILED if result.failed else 0)


def _key(
    console: Console, backend: str | None, dialect: str | None, variable: str | None, file: Path | None
) -> EndpointKey | None:
    """The API key that flags or the environment name for the endpoint. Raises `InputError`."""
    if backend is None:
        for flag, value in (("--dialect", dialect), ("--api-key-env", variable), ("--api-key-file", file)):
            if value is not None:
                raise InputError(f"{flag} is for an endpoint elsewhere: name it with --backend")
        return None
    key = find_key(backend, dialect_for(dialect, backend), os.environ, variable=variable, file=file)
    if key.warning is not None:
        console.print(f"warning: {key.warning}", highlight=False, markup=False, soft_wrap=True)
    return key


def _also(text: str, dialect: str | None) -> tuple[str, EndpointKey]:
    """The address and the key of a further endpoint. Raises `InputError`."""
    address, *names = text.split() or [""]
    if not address or len(names) > 1:
        raise InputError(
            f"--also {text!r}: must be an address, and the name of the variable with its key if it has one"
        )
    try:
        return address, find_key(address, dialect_for(dialect, address), os.environ, variable=next(iter(names), None))
    except InputError as error:
        raise InputError(f"--also {text!r}: {str(error).removeprefix('api_key_env').removeprefix('=')}") from None


def _template(text: str | None, *, escapes: bool = True) -> str | None:
    """The text of a template, or of the file that it names as `@FILE`. Raises `InputError`."""
    if text is None:
        return None
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"template {text[1:]} cannot be read: {error}") from error
    # A shell passes "\n" on as two characters, which are never meant literally.
    return text.replace("\\n", "\n").replace("\\t", "\t") if escapes else text


def _has_begun(report: RunReport) -> bool:
    """Whether a run ended any line, or had to pay for something."""
    spending = report.spending
    return report.done > report.resumed or bool(spending and (spending.cost or spending.unknown_requests))


def _not_here(failure: Failure) -> str:
    """Return what is wrong with the models that lines name, and how to get the lines answered."""
    if "does not serve" in failure.message:  # it is here, so no other model answers in its name
        return (
            "is here for other lines: leave the model out of them, or load one that answers them, with --model, "
            "--embedding-model or --classifier"
        )
    return "is not here: to have them answered nevertheless, add --served-model-name NAME (or '*')"


def _show(console: Console, report: RunReport, *, quiet: bool = False) -> None:
    from rich.text import Text

    if quiet:
        return
    if report.resumed == report.total and report.total:
        console.print(Text(f"{visible(report.output)} is complete: there was nothing left to do."))
    console.print(report_table(report))
    if any(failure.retryable for failure in report.failures):
        console.print("The same command with --retry-failed tries those again that may succeed later.", highlight=False)
    not_found = [failure for failure in report.failures if failure.code == ModelNotFound.code]
    if not_found and not report.pacing:
        console.print(
            f"{not_found[0].count:,} of them name a model that {_not_here(not_found[0])}, and --overwrite.",
            highlight=False,
        )
    if report.failures:
        console.print(failures_table(report))
    endless = sum(failure.count for failure in report.failures if failure.code == NO_ANSWER_BOUND)
    if endless:
        console.print(
            f"{counted(endless, 'line')} without max_tokens: what they may cost has no bound, which a budget needs. "
            "Give it in the lines, or run these as a job of their own with --max-tokens.",
            highlight=False,
        )


def _flag(name: str) -> str | None:
    """The value of a flag of this command, as it was given."""
    arguments = sys.argv[1:]
    if name in arguments[:-1]:
        return arguments[arguments.index(name) + 1]
    return next((each.partition("=")[2] for each in arguments if each.startswith(f"{name}=")), None)


def _show_interruption(console: Console, interruption: RunInterrupted, quiet: bool) -> None:
    report = interruption.report
    if not quiet:
        console.print(report_table(report))
        if report.failures:
            console.print(failures_table(report))
    if report.output == "-" or is_special(Path(report.output)):
        message = "Interrupted. What is no file cannot be resumed: name a file with -o next time."
    else:
        arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
        program = Path(sys.argv[0]).name
        command = shlex.join(
            [*(["python", "-m", "batchwright"] if program == "__main__.py" else [program]), *arguments]
        )
        message = f"Interrupted: {report.done:,} of {report.total:,} lines are finished and kept. To go on: {command}"
    message += paid_so_far(report)
    if report.batches is not None:
        named = [(flag, _flag(flag)) for flag in ("--backend", "--dialect", "--api-key-env", "--api-key-file")]
        message += batches_left(report, [part for flag, value in named if value is not None for part in (flag, value)])
    if interruption.kept_input is not None:
        message += f"\nwith the same input, which is kept in {interruption.kept_input}"
    console.print(message, highlight=False, markup=False, soft_wrap=True)
