"""Opening the batch API of the provider at an address."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from batchwright.errors import InputError
from batchwright.inference.batches.anthropic_batches import AnthropicBatches, Translation
from batchwright.inference.batches.file_client import FileClient
from batchwright.inference.batches.fireworks_batches import ACCOUNT_VARIABLE, FireworksBatches, control_plane
from batchwright.inference.batches.kinds import ANTHROPIC_KIND, ProviderKind, kind_of
from batchwright.inference.batches.openai_batches import MistralBatches, OpenAIBatches
from batchwright.inference.batches.provider import BatchProvider
from batchwright.inference.batches.times import duration_seconds
from batchwright.inference.endpoint_keys import EndpointKey
from batchwright.wire.dialects import ANTHROPIC, Dialect, dialect_for


def open_provider(
    base_url: str,
    key: str | EndpointKey | None,
    *,
    dialect: Dialect | None = None,
    kind: ProviderKind | None = None,
    window: str | None = None,
) -> BatchProvider:
    """Open the batch API at an address; nothing is sent yet.

    `dialect` and `kind`, the provider's differences, default to those of its host; `window`: a completion window that
    it must accept. Raises `InputError`.
    """
    dialect = dialect or dialect_for(None, base_url)
    kind = kind or (ANTHROPIC_KIND if dialect.name == ANTHROPIC.name else kind_of(base_url))
    if window is not None:
        _require_window(kind, window)
    address = control_plane(base_url) if kind.form == "fireworks" else base_url
    try:
        client = FileClient(address, key, dialect=ANTHROPIC if kind.form == "anthropic" else dialect)
    except ValueError as error:
        raise InputError(str(error)) from None
    if kind.form == "anthropic":
        return AnthropicBatches(client, kind, _Messages())
    if kind.form == "fireworks":
        return FireworksBatches(client, kind, os.environ.get(ACCOUNT_VARIABLE) or None)
    return (MistralBatches if kind.form == "mistral" else OpenAIBatches)(client, kind)


def _require_window(kind: ProviderKind, window: str) -> None:
    """Raise `InputError` unless a provider accepts a completion window."""
    seconds = duration_seconds("batch_window", window)
    if kind.window_span is not None:
        shortest, longest = kind.window_span
        if not duration_seconds("", shortest) <= seconds <= duration_seconds("", longest):
            raise InputError(f"batch_window={window!r}: {kind.name} takes {shortest} to {longest}")
    elif kind.windows is not None and window not in kind.windows:
        raise InputError(f"batch_window={window!r}: {kind.name} takes {' or '.join(kind.windows)}")


class _Messages(Translation):
    """Translation by the dialect that is also used for live requests."""

    def request(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return ANTHROPIC.body(endpoint, body)

    def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return ANTHROPIC.answer(dict(body), int(time.time()))
