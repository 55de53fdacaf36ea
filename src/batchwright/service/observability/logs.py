"""Structured logs on standard error: one event per line, with the id of the request that it belongs to.

The records of uvicorn and of other libraries pass through the same processors.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog
from stamina.instrumentation import RetryDetails, set_on_retry_hooks

from batchwright.errors import BatchwrightError

if TYPE_CHECKING:
    from structlog.typing import Processor

    from batchwright.service.settings import LogFormat, LogLevel

logger: structlog.stdlib.BoundLogger = structlog.get_logger("batchwright.server")

_QUIET = ("aiohttp", "httpx", "httpcore", "asyncio", "uvicorn", "uvicorn.error", "uvicorn.access")
"""Loggers shown from `warning` on; requests, start and end are logged by the service itself."""


def configure_logging(log_format: LogFormat, level: LogLevel) -> None:
    """Set up logging for the whole process. May be called again."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(allow=()),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    # Without the values of variables, which include prompts and keys.
    frames = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))
    plain = structlog.dev.plain_traceback
    last: list[Processor] = (
        [frames, structlog.processors.JSONRenderer(default=str)]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    set_on_retry_hooks([_log_retry])


def _log_retry(details: RetryDetails) -> None:
    """Log a retry: at `debug` what a database driver repeats within a second, at `warning` an operation that waits."""
    level = logging.WARNING if isinstance(details.caused_by, BatchwrightError) else logging.DEBUG
    seconds = round(details.wait_for, 2)
    logger.log(level, "trying_again", error=str(details.caused_by), tries=details.retry_num, seconds=seconds)
