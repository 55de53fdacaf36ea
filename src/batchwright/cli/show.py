"""`batchwright show`: read the answers of a run beside its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli.visible_text import visible
from batchwright.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.reading import ReadableResult

HELP = (
    "Read answers beside their prompts.\n\nRESULTS is the output of a run, in any of its forms. Prompts of result "
    "lines are taken from the input, if it is still where it was."
)


def show_command(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="The output of a run, or its address.")],
    number: Annotated[int, typer.Option("-n", min=0, help="Most results to show; 0 is all.")] = 10,
    failed: Annotated[bool, typer.Option("--failed", help="Only those that failed.")] = False,
    search: Annotated[str | None, typer.Option(metavar="TEXT", help="Only those with this text anywhere.")] = None,
) -> None:
    """See `HELP`."""
    from rich.console import Console

    from batchwright.jobs.reading import read_results
    from batchwright.jobs.remote.addresses import scheme_of

    if scheme_of(results) is None and not Path(results).exists():
        raise InputError(f"{results} does not exist: name the output of a run")
    console = Console()
    shown = 0
    # One more than is shown, to know whether there is more.
    for result in read_results(results, most=number + 1 if number else None, failed=failed, search=search):
        if number and shown == number:
            console.print(f"There are more: -n {10 * number}, or -n 0 for all.", style="dim", highlight=False)
            return
        _print(console, result)
        shown += 1
    if not shown:
        console.print("No result." if not failed and search is None else "No such result.")


def _print(console: Console, result: ReadableResult) -> None:
    from rich.text import Text

    about = [] if result.tokens is None else [f"{result.tokens:,} tokens"]
    if result.finish_reason == "length":
        about.append("cut off by max_tokens")
    console.print(Text.assemble((visible(result.name), "bold"), (f"  {', '.join(about)}" if about else "", "dim")))
    if result.prompt is not None:
        console.print(Text(visible(result.prompt.strip()), style="cyan"))
    if result.error is not None:
        console.print(Text(visible(result.error), style="red"))
    else:
        console.print(Text(visible((result.answer or "").strip())))
    console.print()
