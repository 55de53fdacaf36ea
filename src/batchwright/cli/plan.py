"""`batchwright plan`: what a run would compute and cost, before it does."""

from __future__ import annotations

import functools
import inspect
from typing import Annotated, Any

from batchwright.cli.flags import set_parameters
from batchwright.cli.run import io_option, run_command
from batchwright.errors import InputError

_PARAGRAPHS = (
    "Say what `run` would compute, before it does, and before anything is spent.",
    "Checks every line and says which would fail and why; counts the tokens of the prompts and the most that can be "
    "generated, lines that are identical, and what prompts have in common, which is computed once; with --backend, "
    "what it would cost, as requests and as the provider's batch; without it, how long it would take on this machine, "
    "from what earlier runs measured, or else from a probe of some seconds, or why that is not known. Takes the "
    "flags of `run` except those about its output.",
    "Example: batchwright plan reviews.csv --chat --prompt-template 'Is this review good? {review}'",
    "Exit status: 0 all lines can be computed, 3 some cannot, 2 bad usage.",
)
HELP = "\n\n".join(_PARAGRAPHS)
_LEFT_OUT = frozenset({
    "output", "dry_run", "overwrite", "ordered", "keep", "output_column", "retry_failed", "retry_invalid", "quiet",
    "report_html",
})  # fmt: skip
"""Parameters of `run` that are about its output."""


def _planning(command: Any) -> Any:
    """The command `run` with only those flags that a plan depends on, and with `--json`."""
    kept = [
        each.replace(default=True) if each.name == "probe" else each
        for each in inspect.signature(command).parameters.values()
        if each.name not in _LEFT_OUT
    ]
    defaults = {
        each.name: each.default for each in inspect.signature(command).parameters.values() if each.name in _LEFT_OUT
    }
    as_json = inspect.Parameter(
        "as_json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, io_option("--json", help="Print the plan as JSON, and nothing else.")],
    )

    @functools.wraps(command)
    def wrapped(*, as_json: bool, **given: Any) -> None:
        if as_json:
            if given["report"] not in (None, "-"):
                raise InputError(f"--json and --report {given['report']}: give one, the JSON is the same")
            given["report"] = "-"
        command(**defaults | given | {"dry_run": True, "quiet": as_json})

    del wrapped.__wrapped__
    set_parameters(wrapped, [*kept, as_json])
    return wrapped


plan_command = _planning(run_command)
