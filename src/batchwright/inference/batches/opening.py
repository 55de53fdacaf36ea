"""Opening the batch API of the provider at an address."""

from __future__ import annotations

import os
from collections.abc import Mapping

from batchwright.errors import InputError
from batchwright.inference.batches.anthropic_batches import HEADERS, AnthropicBatches, Translation
from batchwright.inference.batches.file_client import FileClient
from batchwright.inference.batches.kinds import ProviderKind, kind_of
from batchwright.inference.batches.openai_batches import MistralBatches, OpenAIBatches
from batchwright.inference.batches.provider import BatchProvider
from batchwright.inference.batches.times import duration_seconds

_KEYS = ("BATCHWRIGHT_BACKEND_API_KEY", "OPENAI_API_KEY")


def api_key_of(name: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the key in the variable `name`, or by default in one of those that hold a backend's key.

    Raises `InputError` if there is no variable `name`.
    """
    if name is None:
        return next((environment[each] for each in _KEYS if environment.get(each)), None)
    if not environment.get(name):
        raise InputError(f"--api-key-env {name}: there is no such variable, or it is empty")
    return environment[name]


def open_provider(
    base_url: str,
    api_key: str | None,
    *,
    kind: ProviderKind | None = None,
    translation: Translation | None = None,
    window: str | None = None,
) -> BatchProvider:
    """Open the batch API at an address; nothing is sent yet.

    `kind`: what the provider does differently, by default by its host; `translation`: of bodies, for Anthropic's form;
    `window`: a completion window that it must take. Raises `InputError`.
    """
    kind = kind or kind_of(base_url)
    if window is not None:
        duration_seconds("batch_window", window)
        if kind.windows is not None and window not in kind.windows:
            raise InputError(f"batch_window={window!r}: {kind.name} takes {' or '.join(kind.windows)}")
    try:
        if kind.form != "anthropic":
            client = FileClient(base_url, api_key)
            return (MistralBatches if kind.form == "mistral" else OpenAIBatches)(client, kind)
        # The key goes into a header of its own.
        headers = HEADERS | ({} if api_key is None else {"x-api-key": api_key})
        client = FileClient(base_url, api_key, headers=headers, bearer=False)
    except ValueError as error:
        raise InputError(str(error)) from None
    return AnthropicBatches(client, kind, translation or _NoTranslation())


class _NoTranslation(Translation):
    """The place of a translation where none is needed: batches are only listed, shown and cancelled."""

    def request(self, endpoint: str, body: Mapping[str, object]) -> Mapping[str, object]:
        raise InputError("lines for Anthropic's batches need a translation of their bodies: --dialect anthropic")

    def answer(self, endpoint: str, body: Mapping[str, object]) -> dict[str, object]:
        return dict(body)
