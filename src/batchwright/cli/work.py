"""`batchwright jobs work`: a worker without HTTP."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from batchwright.cli.setting_flags import run_with_settings

if TYPE_CHECKING:
    from batchwright.service.composition import Services
    from batchwright.service.settings import Settings

HELP = "Compute batches without serving HTTP."
_LONG_HELP = "\n\n".join((
    HELP,
    "Any number of workers may share one store, on one machine or, with PostgreSQL and a shared --data, on several. "
    "The flags are those of `serve`. Webhooks are delivered too.",
    "SIGTERM and Ctrl-C let lines that are being computed finish (--drain-grace). Exit status: 0 stopped, 2 bad usage, "
    "1 anything else.",
))  # fmt: skip
_NOT_HERE = (
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


def work_command(context: typer.Context) -> None:
    """See HELP."""
    run_with_settings(context, _run, help_text=_LONG_HELP, without=_NOT_HERE, flags=[_UNTIL_IDLE])


def _run(settings: Settings, *, until_idle: bool) -> None:
    from batchwright.service.observability.logs import configure_logging
    from batchwright.service.process_memory import return_large_blocks

    configure_logging(settings.log_format, settings.log_level)
    return_large_blocks()
    asyncio.run(_work(settings, until_idle))


async def _work(settings: Settings, until_idle: bool) -> None:
    from batchwright.service.composition import open_services
    from batchwright.service.process_memory import exempt_loaded_objects

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # No address is listened on, whatever a settings file that is shared with `serve` says of one.
    async with open_services(settings.model_copy(update={"host": _NO_HOST})) as services:
        exempt_loaded_objects()
        print(f"working on batches in {settings.data}; Ctrl-C to stop", file=sys.stderr)
        idle = asyncio.create_task(_until_idle(services, stop)) if until_idle else None
        await stop.wait()
        if idle is not None:
            idle.cancel()
            with suppress(asyncio.CancelledError):
                await idle


async def _until_idle(services: Services, stop: asyncio.Event) -> None:
    try:
        await services.worker.until_idle()
    finally:
        stop.set()
