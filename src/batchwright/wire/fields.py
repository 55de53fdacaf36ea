"""Fields of a request body in OpenAI's names: which are taken, which are ignored, which are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from batchwright.errors import InvalidRequest

_AS_THEY_ARE = frozenset({
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "n", "min_tokens", "ignore_eos",
})  # fmt: skip
_TRANSLATED = frozenset({
    "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs",
    "priority", "deadline", "deadline_ms",
})  # fmt: skip
_TAKEN = _AS_THEY_ARE | _TRANSLATED

IGNORED = frozenset({
    "metadata", "model", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options", "user",
})  # fmt: skip
"""Change nothing in the result. `model` is here because whoever chooses the model reads it first."""

_NO_TOOLS: tuple[object, ...] = ([], "none", "auto")
REFUSED: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "moderation": (),
    "prompt_logprobs": (False,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "stream": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": _NO_TOOLS,
    "tools": _NO_TOOLS,
    "typical_p": (1.0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Would change the result and are not supported. The values listed mean, as null does, that nothing is asked for."""

_EMBEDDING_TAKEN = frozenset({"dimensions", "encoding_format", "input", "priority", "deadline", "deadline_ms"})

DEFAULT_PRIORITY = 5

_LARGEST = 2.0**64
_LONGEST_NAME = 40


def check_names(body: Mapping[str, object], reserved: frozenset[str], *, strict: bool) -> None:
    """Raises `InvalidRequest` naming the first field that cannot be honoured.

    `reserved` are the names that the form of the body itself uses. With `strict` an unknown name is refused; without,
    only one that looks like a slip of the pen for a field that is known, since lines may carry columns of their own.
    """
    for name, value in body.items():
        if value is None or name in reserved or name in _TAKEN or name in IGNORED:
            continue
        if name in REFUSED:
            if not any(_same(value, neutral) for neutral in REFUSED[name]):
                raise InvalidRequest(f"{name} is not supported: leave it out", param=name, code="unsupported_parameter")
            continue
        if strict or _meant(name, _TAKEN) is not None:
            raise _unknown(name, _TAKEN)


def _same(value: object, other: object) -> bool:
    """Whether they are the same as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def check_embedding_names(body: Mapping[str, object]) -> None:
    """Raises `InvalidRequest` naming the first field of a body for `/v1/embeddings` that cannot be honoured."""
    for name, value in body.items():
        if value is not None and name not in _EMBEDDING_TAKEN and name not in IGNORED:
            raise _unknown(name, _EMBEDDING_TAKEN)


def _unknown(name: str, known: frozenset[str]) -> InvalidRequest:
    meant = _meant(name, known)
    hint = f"did you mean {meant}?" if meant else "leave it out"
    # Python's own JSON reader lets half a surrogate pair through, which no answer could carry back.
    short = name[:_LONGEST_NAME].encode(errors="replace").decode()
    return InvalidRequest(f"{short} is unknown: {hint}", param=short, code="unknown_parameter")


@lru_cache(maxsize=1024)
def _meant(name: str, known: frozenset[str]) -> str | None:
    close = get_close_matches(name, known, n=1, cutoff=0.88) if len(name) <= _LONGEST_NAME else []
    return close[0] if close else None


def sampling_overrides(body: Mapping[str, object], *, chat: bool) -> dict[str, object]:
    """The fields of `SamplingParams` that `body` sets; a field that is null is not set.

    Values are translated, not judged, except where judging them is part of the translation: `SamplingParams` does
    that. Raises `InvalidRequest`.
    """
    given = {name: body[name] for name in _TAKEN & body.keys() if body[name] is not None}
    for name, value in given.items():
        _require_in_range(name, value)
    overrides = {name: given[name] for name in _AS_THEY_ARE & given.keys()}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            overrides["max_tokens"] = given[name]
    if "stop" in given:
        overrides["stop"] = _stop(given["stop"])
    if "stop_token_ids" in given:
        overrides["stop_token_ids"] = _list("stop_token_ids", given["stop_token_ids"])
    if "logit_bias" in given:
        overrides["logit_bias"] = _logit_bias(given["logit_bias"])
    if "logprobs" in given or "top_logprobs" in given:
        overrides["logprobs"] = _chat_logprobs(given) if chat else _completion_logprobs(given)
    return overrides


def deadline_seconds(body: Mapping[str, object]) -> float | None:
    """`deadline` (in seconds) or `deadline_ms` of `body`, as seconds; None when neither is set.

    Raises `InvalidRequest`.
    """
    given = [name for name in ("deadline", "deadline_ms") if body.get(name) is not None]
    if not given:
        return None
    if len(given) == 2:
        raise InvalidRequest("both deadline and deadline_ms are given: give one", param="deadline")
    name, value = given[0], body[given[0]]
    _require_in_range(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        unit = "seconds" if name == "deadline" else "milliseconds"
        raise InvalidRequest(f"{name} must be a number of {unit} above 0", param=name)
    return value / 1000 if name == "deadline_ms" else float(value)


def priority_of(body: Mapping[str, object]) -> int:
    """`priority` of `body`, lower being sooner; the default where it is not set. Raises `InvalidRequest`."""
    priority = body.get("priority")
    if priority is None:
        return DEFAULT_PRIORITY
    _require_in_range("priority", priority)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequest("priority must be a whole number", param="priority")
    return priority


def _require_in_range(name: str, value: object) -> None:
    # Written so that NaN, which Python's own JSON reader lets in, is out of range too.
    if isinstance(value, (int, float)) and not abs(value) < _LARGEST:
        raise InvalidRequest(f"{name} is out of range", param=name)


def _stop(value: object) -> tuple[object, ...]:
    return (value,) if isinstance(value, str) else _list("stop", value)


def _list(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a list", param=name)
    return tuple(value)


def _logit_bias(value: object) -> dict[int, object]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers", param="logit_bias")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError as error:
        raise InvalidRequest("logit_bias has a key that is not a token id", param="logit_bias") from error


def _chat_logprobs(given: Mapping[str, object]) -> object:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise InvalidRequest("logprobs must be true or false in a chat; their number is top_logprobs", param="logprobs")
    if not wanted and top:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return top if wanted else None


def _completion_logprobs(given: Mapping[str, object]) -> object:
    if "top_logprobs" in given:
        raise InvalidRequest(
            "top_logprobs belongs to chats; in a completion logprobs is the number", param="top_logprobs"
        )
    wanted = given["logprobs"]
    if isinstance(wanted, bool):
        return 0 if wanted else None
    return wanted
