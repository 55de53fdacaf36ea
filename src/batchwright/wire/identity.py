"""What distinguishes requests: the fields on which the answer depends, and the prompt whose prefix may be cached."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import msgspec

from batchwright.errors import InvalidRequest
from batchwright.request import SamplingParams
from batchwright.wire.answer_forms import FORM_NAMES
from batchwright.wire.fields import RANGES, sampling_overrides
from batchwright.wire.requests import (
    CHAT_URL,
    COMPLETION_URL,
    ENCODER_URLS,
    OPENAI_DEFAULTS,
    RESPONSES_URL,
    with_defaults,
)

_WITHOUT_EFFECT = frozenset({
    "deadline", "deadline_ms", "expected_tokens", "metadata", "priority", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream", "stream_options", "user",
})  # fmt: skip
"""Fields on which no answer depends."""
_BEFORE_PROMPT = ("tools", "functions", "response_format", "instructions")
"""Fields that a provider puts before the messages of a chat."""
_IN_THEIR_ORDER = frozenset({*FORM_NAMES, "functions", "text", "tools"})
"""Fields with JSON Schemas: properties are answered, and shown to the model, in the order in which they are given."""
_OF_DRAWS = frozenset({"min_p", "seed", "top_k", "top_p"})
"""Fields that do not affect greedy answers of a model here."""
_REAL = frozenset({"frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "temperature", "top_p"})
"""Fields whose whole-number values may be written as integers or as floats."""
_LEFT_OUT: Mapping[str, object] = {"n": 1}
"""Values that mean the same as leaving the field out, wherever chats and completions are computed."""
_LEFT_OUT_HERE: Mapping[str, object] = {
    **{
        name: getattr(OPENAI_DEFAULTS, name)
        for name in (
            "frequency_penalty", "ignore_eos", "min_p", "min_tokens", "n", "presence_penalty", "repetition_penalty",
            "temperature", "top_k", "top_p",
        )
    },
    "logit_bias": {},
    "stop": [],
    "stop_token_ids": [],
}  # fmt: skip
"""Those of a model here. Another may have defaults of its own."""
_LIMITS = frozenset({"max_completion_tokens", "max_tokens"})
"""Names of the same limit; a model here uses the first if both are given."""
_UNENCODABLE = (ValueError, OverflowError, TypeError, RecursionError)
_encode = msgspec.json.Encoder(order="sorted").encode
_encode_in_order = msgspec.json.Encoder().encode


def identity_of(
    endpoint: str,
    body: Mapping[str, Any],
    defaults: SamplingParams | Mapping[str, Any] | None = None,
    model: str | None = None,
    *,
    here: bool = False,
) -> bytes | None:
    """Return 16 bytes that are equal for requests that have the same answer; None if the answer may differ each time.

    `defaults` are for fields that the body leaves out, as in `Call.defaults`; `model` is the name for a body that names
    none. Generated text is the same each time at `temperature` 0 or with a `seed`; what encoders compute always is. A
    request that the provider is to `store` has an effect of its own, and one that searches the web depends on the time.

    `here`: batchwright's own engine computes them. It is known that its greedy answers do not depend on how tokens are
    drawn, that `max_completion_tokens` is `max_tokens`, and which values are its defaults. Of a provider it is only
    known that it makes one choice where no number is given.
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
    if endpoint in (CHAT_URL, COMPLETION_URL):
        left_out = _LEFT_OUT_HERE if here else _LEFT_OUT
        for name in left_out.keys() & fields.keys():
            # A job may have another default, which null stands for, too.
            if _is_default(name, asked[name], left_out) and not _is_given(name, defaults):
                del fields[name]
        if here:
            fields = _as_computed(asked, fields)
    try:
        # Defaults may have keys that are not texts; only JSON makes them texts.
        values: dict[str, Any] = msgspec.to_builtins(fields, str_keys=True)
        ordered = [[name, values.pop(name)] for name in sorted(_IN_THEIR_ORDER & values.keys())]
        return blake2b(_encode([endpoint, values]) + _encode_in_order(ordered), digest_size=16).digest()
    except _UNENCODABLE:
        return None  # it cannot be written as JSON, and is refused for that when it is sent


def counts_whole(body: Mapping[str, Any]) -> bool:
    """Return whether all of a body counts unchanged, so that a model here refuses all requests equal to it, or none."""
    return not (_WITHOUT_EFFECT & body.keys()) and not any(
        value is None
        or (isinstance(value, float) and name not in _REAL and value.is_integer())
        or (name in _LEFT_OUT_HERE and _is_default(name, value, _LEFT_OUT_HERE))
        for name, value in body.items()
    )


def cacheable_prompt(endpoint: str, body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the scope in which a provider's prompt cache compares a request, and the prompt as the cache compares it.

    Requests can share the prefix of their prompts if their scopes are equal. The prompt is empty if nothing is
    generated, and so nothing cached.
    """
    if endpoint in ENCODER_URLS:
        return b"", b""
    before = [body.get(name) for name in _BEFORE_PROMPT]
    prompt = body.get({CHAT_URL: "messages", RESPONSES_URL: "input"}.get(endpoint, "prompt"))
    try:
        return cache_scope(endpoint, body), _encode([*before, prompt] if any(before) else prompt)
    except _UNENCODABLE:
        return b"", b""


def cache_scope(endpoint: str, body: Mapping[str, Any]) -> bytes:
    """Return what is equal for requests that can share the prefix of their prompts in a provider's prompt cache.

    Empty for values that cannot be written as JSON.
    """
    try:
        return _encode([endpoint, body.get("model"), body.get("prompt_cache_key")])
    except _UNENCODABLE:
        return b""


def _is_default(name: str, value: object, left_out: Mapping[str, object]) -> bool:
    """Return whether a field has its value in `left_out`, in a type that a model here takes."""
    default = left_out[name]
    return value == default and (type(value) is type(default) or (name in _REAL and type(value) is int))


def _is_given(name: str, defaults: SamplingParams | Mapping[str, Any] | None) -> bool:
    """Return whether `defaults` have another value for a field than OpenAI's."""
    if isinstance(defaults, SamplingParams):
        return bool(getattr(defaults, name) != getattr(OPENAI_DEFAULTS, name))
    return defaults is not None and name in defaults


def _as_computed(asked: Mapping[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields`, those of `asked` that count, without the ones that affect no answer of a model here.

    The limit gets one name. If a value would be refused, all fields are left as they are: the request must not get
    another one's answer.
    """
    given = {name: asked[name] for name in (_OF_DRAWS | _LIMITS) & fields.keys()}
    if not given.keys() - {"max_tokens"}:
        return fields
    seed, (lowest, highest) = given.get("seed", 0), RANGES["seed"]
    if type(seed) is not int or not lowest <= seed <= highest:
        return fields
    try:
        if not _are_taken(tuple((name, type(value), value) for name, value in given.items() if name != "seed")):
            return fields
    except TypeError:
        return fields  # a list or an object
    without = _LIMITS | (_OF_DRAWS if fields.get("temperature") == 0 else frozenset())
    found = {name: value for name, value in fields.items() if name not in without}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            found["max_tokens"] = given[name]
    return found


@lru_cache(maxsize=1024)
def _are_taken(given: tuple[tuple[str, type, Any], ...]) -> bool:
    """Return whether a model here accepts the values of these fields. A limit of 0 also depends on others."""
    fields = {name: value for name, _, value in given}
    try:
        SamplingParams(**cast("dict[str, Any]", sampling_overrides(fields, chat=False)))
    except (InvalidRequest, ValueError, OverflowError, TypeError):
        return False
    return True


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
