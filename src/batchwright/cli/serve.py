"""`batchwright serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from batchwright.cli.setting_flags import PASSED_ON, run_with_settings

if TYPE_CHECKING:
    from batchwright.service.settings import Settings

__all__ = ["HELP", "PASSED_ON", "serve_command"]

HELP = "Serve online requests and batch jobs over HTTP, on one engine."
_LONG_HELP = "\n\n".join((
    HELP,
    "OpenAI clients work with it unchanged: base_url=http://127.0.0.1:8000/v1. Without an API key (batchwright keys "
    "create) only this machine can reach it. State lies in --data; started again, it goes on where it was.",
    "Every flag may also be set in the environment (--max-lines as BATCHWRIGHT_MAX_LINES) or in a TOML file "
    "(max_lines); a flag goes before the environment, the environment before the file.",
    "SIGTERM and Ctrl-C let online requests finish; a second Ctrl-C does not. Exit status: 0 stopped, 2 bad usage, 1 "
    "anything else.",
))  # fmt: skip


def serve_command(context: typer.Context) -> None:
    """See HELP."""

    def run(settings: Settings) -> None:
        from batchwright.server.process import serve

        serve(settings)

    run_with_settings(context, run, help_text=_LONG_HELP)
