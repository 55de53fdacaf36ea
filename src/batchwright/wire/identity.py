"""What distinguishes requests: the fields on which the answer depends, and the prompt whose prefix may be cached."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from batchwright.request import SamplingParams
from batchwright.wire.answer_forms import FORM_NAMES
from batchwright.wire.requests import CHAT_URL, ENCODER_URLS, RESPONSES_URL, with_defaults

_WITHOUT_EFFECT = frozenset({
    "deadline", "deadline_ms", "expected_tokens", "metadata", "priority", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream", "stream_options", "user",
})  # fmt: skip
"""Fields on which no answer depends."""
_BEFORE_PROMPT = ("tools", "functions", "response_format", "instructions")
"""Fields that a provider puts before the messages of a chat."""
_IN_THEIR_ORDER = frozenset({*FORM_NAMES, "functions", "text", "tools"})
"""Fields with JSON Schemas: properties are answered, and shown to the model, in the order in which they are given."""
_encode = msgspec.json.Encoder(order="sorted").encode
_encode_in_order = msgspec.json.Encoder().encode


def identity_of(
    endpoint: str,
    body: Mapping[str, Any],
    defaults: SamplingParams | Mapping[str, Any] | None = None,
    model: str | None = None,
) -> bytes | None:
    """Return 16 bytes that are equal for requests that have the same answer; None if the answer may differ each time.

    `defaults` are for fields that the body leaves out, as in `Call.defaults`; `model` is the name for a body that names
    none. Generated text is the same each time at `temperature` 0 or with a `seed`; what encoders compute always is. A
    request that the provider is to `store` has an effect of its own, and one that searches the web depends on the time.
    """
    asked: Mapping[str, Any] = body
    if endpoint not in ENCODER_URLS:
        if not _is_deterministic(body, defaults):
            return None
        if defaults is not None:
            asked = with_defaults(body, defaults, chat=endpoint == CHAT_URL)
    fields = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in asked.items()
        if value is not None and name not in _WITHOUT_EFFECT
    }
    if model is not None:
        fields.setdefault("model", model)
    try:
        # Defaults may have keys that are no text, which only JSON makes so.
        values: dict[str, Any] = msgspec.to_builtins(fields, str_keys=True)
        ordered = [[name, values.pop(name)] for name in sorted(_IN_THEIR_ORDER & values.keys())]
        return blake2b(_encode([endpoint, values]) + _encode_in_order(ordered), digest_size=16).digest()
    except (ValueError, OverflowError, TypeError, RecursionError):
        return None  # it has no form as JSON, for which it is refused when it is sent


def cacheable_prompt(endpoint: str, body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the prompt of a request as a provider's prompt cache compares it, after the scope of its comparisons.

    Requests can share the prefix of their prompts if their scopes are equal. The prompt is empty where
    nothing is generated, and nothing cached.
    """
    if endpoint in ENCODER_URLS:
        return b"", b""
    before = [body.get(name) for name in _BEFORE_PROMPT]
    prompt = body.get({CHAT_URL: "messages", RESPONSES_URL: "input"}.get(endpoint, "prompt"))
    try:
        scope = _encode([endpoint, body.get("model"), body.get("prompt_cache_key")])
        return scope, _encode([*before, prompt] if any(before) else prompt)
    except (ValueError, OverflowError, TypeError, RecursionError):
        return b"", b""


def _is_deterministic(body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any] | None) -> bool:
    def asked(name: str) -> object:
        if name in body or defaults is None:
            return body.get(name)
        if isinstance(defaults, SamplingParams):
            return getattr(defaults, name, None)
        return defaults.get(name)

    temperature = asked("temperature")
    is_known = (temperature == 0 and not isinstance(temperature, bool)) or asked("seed") is not None
    return is_known and not asked("store") and asked("web_search_options") is None
