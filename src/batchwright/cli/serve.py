"""`batchwright serve` and `batchwright jobs work`, whose flags are the settings of the service.

Those need the extra `server`, so they are imported only when one of the commands is called.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchwright.cli.flags import flag, refuse_key_flag, set_parameters
from batchwright.errors import MissingExtra

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from batchwright.service.composition import Services
    from batchwright.service.settings import Settings

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Typer's settings for these commands, which parse their arguments themselves."""

SERVE_HELP = "Serve online requests and batch jobs over HTTP, on one engine."
_LONG_SERVE_HELP = "\n\n".join((
    SERVE_HELP,
    "OpenAI clients work with it unchanged: base_url=http://127.0.0.1:8000/v1. Without an API key (batchwright keys "
    "create) only this machine can reach it. State is kept in --data; restarted, it goes on where it was.",
    "Every flag may also be set in the environment (--max-lines as BATCHWRIGHT_MAX_LINES) or in a TOML file "
    "(max_lines); a flag overrides the environment, and the environment the file.",
    "SIGTERM and Ctrl-C let online requests finish; a second Ctrl-C does not. Exit status: 0 stopped, 2 bad usage, 1 "
    "anything else.",
))  # fmt: skip
WORK_HELP = "Compute batches without serving HTTP."
_LONG_WORK_HELP = "\n\n".join((
    WORK_HELP,
    "Any number of workers may share one store, on one machine or, with PostgreSQL and a shared --data, on several. "
    "The flags are those of `serve`. Webhooks are delivered too.",
    "SIGTERM and Ctrl-C let lines that are being computed finish (--drain-grace). Exit status: 0 stopped, 2 bad usage, "
    "1 anything else. With --until-idle: 0 nothing is left, 143 stopped before that by SIGTERM, 130 by Ctrl-C.",
))  # fmt: skip
_NOT_OF_WORK = (
    "host", "port", "cors_origins", "max_online_sequences", "max_online_tokens", "max_online_body_size",
    "max_body_size", "max_body_memory", "upload_timeout", "ttft_ms", "tpot_ms", "tls_cert", "tls_key",
    "max_connections", "max_connections_per_address", "header_timeout", "idle_timeout", "write_timeout",
    "min_upload_rate", "max_page_streams", "quota_requests_per_minute", "quota_tokens_per_minute",
    "quota_concurrent_requests",
)  # fmt: skip
_NO_HOST = "127.0.0.1"
_UNTIL_IDLE = inspect.Parameter(
    "until_idle",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--until-idle", help="End when there is nothing left to compute; paused batches stay.")
    ],
)


def serve_command(context: typer.Context) -> None:
    """See `SERVE_HELP`."""

    def run(settings: Settings) -> None:
        from batchwright.server.process import serve

        serve(settings)

    _run_with_settings(context, run, help_text=_LONG_SERVE_HELP)


def work_command(context: typer.Context) -> None:
    """See `WORK_HELP`."""

    def run(settings: Settings, *, until_idle: bool) -> None:
        from batchwright.service.observability.logs import configure_logging
        from batchwright.service.process_memory import return_large_blocks

        configure_logging(settings.log_format, settings.log_level)
        return_large_blocks()
        ended_by = asyncio.run(_work(settings, until_idle))
        # A worker stopped with work left must not look to its caller as if all work were done.
        if until_idle and ended_by is not None:
            raise typer.Exit(128 + ended_by)

    _run_with_settings(context, run, help_text=_LONG_WORK_HELP, without=_NOT_OF_WORK, flags=[_UNTIL_IDLE])


async def _work(settings: Settings, until_idle: bool) -> int | None:
    """Compute until a signal comes, or there is nothing left. Returns the number of the signal that ended it."""
    from batchwright.service.composition import open_services
    from batchwright.service.process_memory import exempt_loaded_objects

    loop = asyncio.get_running_loop()
    end: asyncio.Future[int | None] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _settle, end, number)
    # A worker listens on no address, whatever host a settings file shared with `serve` names.
    async with open_services(settings.model_copy(update={"host": _NO_HOST})) as services:
        exempt_loaded_objects()
        print(f"working on batches in {settings.data}; Ctrl-C to stop", file=sys.stderr)
        idle = asyncio.create_task(_until_idle(services, end)) if until_idle else None
        ended_by = await end
        if idle is not None:
            idle.cancel()
            with suppress(asyncio.CancelledError):
                await idle
    return ended_by


async def _until_idle(services: Services, end: asyncio.Future[int | None]) -> None:
    try:
        await services.worker.until_idle()
    finally:
        _settle(end, None)


def _settle(end: asyncio.Future[int | None], ended_by: int | None) -> None:
    """Set the result unless there is one already: the first counts."""
    if not end.done():
        end.set_result(ended_by)


def _run_with_settings(
    context: typer.Context,
    run: Callable[..., None],
    *,
    help_text: str,
    without: Collection[str] = (),
    flags: Collection[inspect.Parameter] = (),
) -> None:
    """Parse the arguments of `context` and call `run` with the settings, and with the values of `flags` by name.

    `without`: settings that are not flags of this command. Raises `MissingExtra`, and `InputError` for a bad setting.
    """
    try:
        from batchwright.service.setting_sources import CONFIG_VARIABLE, default_config, load_settings
        from batchwright.service.settings import has_flag, setting_fields
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{context.info_name} needs {error.name}; install it: pip install 'batchwright[server]'"
        ) from error

    def command(config: Path | None = None, **given: Any) -> None:
        own = {each.name: given.pop(each.name) for each in flags}
        values = {name: _joined(value) for name, value in given.items()}
        run(load_settings(values, config=config), **own)

    refuse_key_flag(context.args, prefix="backend-")
    settings = [
        _setting_flag(name, field)
        for name, field in setting_fields().items()
        if name not in without and has_flag(field)
    ]
    description = (
        f"TOML file of settings, else the one that {CONFIG_VARIABLE} names, else {default_config()} if there is one."
    )
    set_parameters(command, [*flags, *settings, flag("config", Path, description, "Operation", metavar="FILE")])
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=help_text)(command)
    app(context.args, prog_name=context.command_path)


def _joined(given: object) -> object:
    """Return the values of a flag that may be repeated as one text separated by commas, None if it is not given."""
    return (",".join(given) if given else None) if isinstance(given, list) else given


def _setting_flag(name: str, field: FieldInfo) -> inspect.Parameter:
    from batchwright.service.settings import group_of, shown_default, type_name

    description, group, default = field.description or "", group_of(field), shown_default(field)
    if field.annotation is bool:
        return flag(name, bool, description, group, default)
    kind = type_name(field)
    if kind == "list":
        return flag(name, list[str], description, group, default, metavar="LIST")
    return flag(name, str, description, group, default, metavar=kind if "|" in kind else kind.upper())
