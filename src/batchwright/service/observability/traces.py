"""OpenTelemetry: spans for calls, batches of lines and commits of the store.

Spans of HTTP requests are the web framework's own. Where spans go is said by OpenTelemetry's own variables, such as
OTEL_EXPORTER_OTLP_ENDPOINT; without them nothing is imported here and nothing recorded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from batchwright.errors import MissingExtra

_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment says where spans go."""
    return environment.get("OTEL_SDK_DISABLED", "").lower() != "true" and any(map(environment.get, _VARIABLES))


class Tracing:
    """Maker of spans, or of nothing."""

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
        """A span around a block; an exception that leaves the block is recorded in it."""
        if self._tracer is None:
            return nullcontext()
        span: AbstractContextManager[object] = self._tracer.start_as_current_span(
            name, attributes={f"batchwright.{key}": value for key, value in attributes.items()}
        )
        return span
