"""OpenTelemetry: spans for calls, batches of lines and commits of the store.

Spans of HTTP requests are the web framework's own. OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_ENDPOINT,
say where spans are sent; without them nothing is imported here and nothing is recorded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from batchwright.errors import MissingExtra

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment says where to send spans."""
    return environment.get("OTEL_SDK_DISABLED", "").lower() != "true" and any(map(environment.get, _VARIABLES))


class Tracing:
    """Source of spans; they do nothing unless tracing is enabled."""

    def __init__(self, enabled: bool = False) -> None:
        """Raises `MissingExtra` when tracing is to be enabled and OpenTelemetry is not installed."""
        self._tracer: Any = None
        if enabled:
            try:
                from opentelemetry import trace
            except ModuleNotFoundError as error:
                raise MissingExtra(
                    f"{' or '.join(_VARIABLES)} asks for traces: pip install 'batchwright[otel]', or unset it"
                ) from error
            self._tracer = trace.get_tracer("batchwright")

    def span(self, name: str, **attributes: str | int | float) -> AbstractContextManager[object]:
        """Return a span around a block, in which an exception that leaves the block is recorded."""
        if self._tracer is None:
            return nullcontext()
        named = {f"batchwright.{key}": value for key, value in attributes.items()}
        return cast("AbstractContextManager[object]", self._tracer.start_as_current_span(name, attributes=named))
