"""The command `batchwright`: its subcommands, and the exit status that errors lead to."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from batchwright.cli import batches, jobs, keys, models, plan, quotas, report, run, serve, show, simulate, webhooks
from batchwright.cli.visible_text import visible
from batchwright.errors import (
    BatchwrightError,
    InputError,
    InvalidRequest,
    MissingExtra,
    ModelNotFound,
    ResumeRefused,
    UnsupportedModel,
)
from batchwright.version import __version__

BAD_USAGE = 2
FAILED = 1
_SETTING = re.compile(r"(?:^| with | and )(\w+)=")
"""A setting named as in the Python interface, at the beginning of an error or after another such setting."""
_USAGE_ERRORS = (InputError, InvalidRequest, MissingExtra, ModelNotFound, ResumeRefused, UnsupportedModel)

app = typer.Typer(
    name="batchwright",
    help="Turns many LLM requests into few, full, well-shaped batches.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("run", help=run.HELP, cls=run.RunCommand)(run.run_command)
app.command("plan", help=plan.HELP, cls=run.RunCommand)(plan.plan_command)
app.command("show", help=show.HELP)(show.show_command)
app.command("report", help=report.HELP)(report.report_command)
app.command("simulate", help=simulate.HELP)(simulate.simulate_command)
app.command("serve", help=serve.SERVE_HELP, context_settings=serve.PASSED_ON, add_help_option=False)(
    serve.serve_command
)
app.add_typer(models.app, name="models")
app.add_typer(jobs.app, name="jobs")
app.add_typer(batches.app, name="batches")
app.add_typer(keys.app, name="keys")
app.add_typer(quotas.app, name="quotas")
app.add_typer(webhooks.app, name="webhooks")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def with_flags_named(message: str, arguments: Sequence[str]) -> str:
    """Return the message of an error, in which settings that are flags of the command are named as such."""
    command = typer.main.get_command(app)
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    flags = {each.name: each.opts[0] for each in command.params if each.opts[0].startswith("--")}

    def named(found: re.Match[str]) -> str:
        flag = flags.get(found[1])
        return found[0] if flag is None else found[0].replace(f"{found[1]}=", f"{flag} ")

    first = _SETTING.match(message)
    return _SETTING.sub(named, message) if first and first[1] in flags else message


def main() -> None:
    """Run the command line and end the process with its exit status.

    A caller's error is one line on standard error and status 2, a failure of a valid request the same with status 1;
    a defect of batchwright itself shows its traceback.
    """
    try:
        app()
    except (BatchwrightError, OSError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, InputError):
            message = with_flags_named(message, sys.argv[1:])
        print(f"error: {visible(message)}", file=sys.stderr)
        sys.exit(BAD_USAGE if isinstance(error, _USAGE_ERRORS) else FAILED)
    finally:
        # Python collects garbage twice more before it ends, which takes half a second with a model's libraries. But
        # Triton objects that are not collected are reported as leaked.
        if "triton" in sys.modules:
            gc.unfreeze()
        else:
            gc.freeze()
