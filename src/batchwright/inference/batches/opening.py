"""Opening the batch API of the provider at an address."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from batchwright.errors import InputError
from batchwright.inference.batches.anthropic_batches import AnthropicBatches, Translation
from batchwright.inference.batches.file_client import FileClient
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

    `dialect` and `kind`, what the provider does differently, are by default those of its host; `window`: a completion
    window that it must take. Raises `InputError`.
    """
    dialect = dialect or dialect_for(None, base_url)
    kind = kind or (ANTHROPIC_KIND if dialect.name == ANTHROPIC.name else kind_of(base_url))
    if window is not None:
        duration_seconds("batch_window", window)
        if kind.windows is not None and window not in kind.windows:
            raise InputError(f"batch_window={window!r}: {kind.name} takes {' or '.join(kind.windows)}")
    try:
        client = FileClient(base_url, key, dialect=ANTHROPIC if kind.form == "anthropic" else dialect)
    except ValueError as error:
        raise InputError(str(error)) from None
    if kind.form == "anthropic":
        return AnthropicBatches(client, kind, _Messages())
    return (MistralBatches if kind.form == "mistral" else OpenAIBatches)(client, kind)


class _Messages(Translation):
    """Translation by the dialect that live requests have, too."""

    def request(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return ANTHROPIC.body(endpoint, body)

    def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return ANTHROPIC.answer(dict(body), int(time.time()))
