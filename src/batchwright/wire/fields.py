"""Fields of a request body by their OpenAI names: those that are used, ignored or refused."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from batchwright.errors import InvalidRequest, shown
from batchwright.request import MAX_COMPLETIONS, MAX_DEADLINE, MAX_TOP_LOGPROBS
from batchwright.wire.answer_forms import FORM_NAMES, form_overrides
from batchwright.wire.bounds import MAX_TOKEN_DIGITS, require_few_fields, require_size

_AS_THEY_ARE = frozenset({
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "n", "min_tokens", "ignore_eos",
})  # fmt: skip
_TRANSLATED = frozenset({
    "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "logit_bias", "logprobs", "top_logprobs",
    "prompt_logprobs", "priority", "deadline", "deadline_ms", "expected_tokens", *FORM_NAMES,
})  # fmt: skip
_TAKEN = _AS_THEY_ARE | _TRANSLATED

IGNORED: Mapping[str, type] = {
    "metadata": dict,
    "model": str,
    "prediction": dict,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "stream_options": dict,
    "user": str,
}
"""Fields that do not change the result, and their types. `model` is read earlier, to choose what computes."""
_TYPES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}

_NO_TOOLS: tuple[object, ...] = ([], "none", "auto")
REFUSED: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": ("none",),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": _NO_TOOLS,
    "tools": _NO_TOOLS,
    "typical_p": (1.0,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that would change the result but are not supported, and their values that, like null, ask for nothing.

Some are for chats only (`chats.CHAT_NAMES`), and refused elsewhere."""

DEFAULT_PRIORITY = 5

MAX_TEMPERATURE = 2.0
"""OpenAI's limit. `SamplingParams` takes more."""
MAX_TOKENS = 2**31 - 1
ANSWER_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields that limit the tokens of an answer; the first one that is set applies."""
RANGES: Mapping[str, tuple[int, int]] = {
    "best_of": (1, MAX_COMPLETIONS),
    "expected_tokens": (0, MAX_TOKENS),
    "max_completion_tokens": (1, MAX_TOKENS),
    "max_tokens": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "n": (1, MAX_COMPLETIONS),
    "priority": (-(2**31), 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}
"""Ranges of integer fields, if they are not simply those of `SamplingParams`."""

_LONGEST_NAME = 40


def check_names(
    body: Mapping[str, object],
    reserved: frozenset[str],
    taken: frozenset[str] = _TAKEN,
    refused: Mapping[str, tuple[object, ...]] = REFUSED,
    *,
    why: str = "is not supported",
) -> None:
    """Raise `InvalidRequest` naming the first field that cannot be honoured, or is too large.

    `reserved` are the names that the form of the body uses, `taken` those of parameters; `refused` is like `REFUSED`,
    and `why` is what the error says about those.
    """
    require_few_fields(body)
    for name, value in body.items():
        if value is None:
            continue
        if name in reserved or name in taken:
            require_size(name, value)
        elif name in IGNORED:
            _require_ignorable(name, value)
        elif name not in refused:
            raise _unknown(name, taken)
        # In Python, unlike in JSON, False equals 0.
        elif not any(value == no and isinstance(value, bool) == isinstance(no, bool) for no in refused[name]):
            raise InvalidRequest(f"{name} {why}: leave it out", param=name, code="unsupported_parameter")


def known_fields(line: Mapping[str, object], reserved: frozenset[str]) -> dict[str, object]:
    """Return the fields of `line` that belong to a body. The others are the user's columns, and are left out.

    `reserved` as for `check_names`. Raises `InvalidRequest` for a column that looks like a misspelled field.
    """
    body = {}
    for name, value in line.items():
        if name in reserved or name in _TAKEN or name in REFUSED:
            body[name] = value
        elif name not in IGNORED and value is not None and _meant(name, _TAKEN) is not None:
            raise _unknown(name, _TAKEN)
    return body


def require_type(name: str, value: object, kind: type) -> None:
    """Raise `InvalidRequest` unless `value` is a `kind`: str, bool, dict or list."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name}={shown(value)}: must be {_TYPES[kind]}", param=name)


def _require_ignorable(name: str, value: object) -> None:
    require_size(name, value)
    require_type(name, value, IGNORED[name])
    if name == "metadata" and isinstance(value, dict):
        for key, text in value.items():
            require_type(f"metadata.{key}", text, str)


def _unknown(name: str, known: frozenset[str]) -> InvalidRequest:
    meant = _meant(name, known)
    hint = f"did you mean {meant}?" if meant else "leave it out"
    # Python's own JSON parser accepts lone surrogates, which no answer could contain.
    short = name[:_LONGEST_NAME].encode(errors="replace").decode()
    return InvalidRequest(f"{short} is unknown: {hint}", param=short, code="unknown_parameter")


@lru_cache(maxsize=1024)
def _meant(name: str, known: frozenset[str]) -> str | None:
    close = get_close_matches(name, known, n=1, cutoff=0.88) if len(name) <= _LONGEST_NAME else []
    return close[0] if close else None


def sampling_overrides(body: Mapping[str, object], *, chat: bool) -> dict[str, object]:
    """Return the fields of `SamplingParams` that `body` sets; a field that is null is not set.

    Values are translated, and checked only where the translation needs it: `SamplingParams` checks the rest. Raises
    `InvalidRequest`.
    """
    given = {name: body[name] for name in _TAKEN & body.keys() if body[name] is not None}
    for name in RANGES.keys() & given.keys():
        _require_whole(name, given[name])
    temperature = given.get("temperature")
    if isinstance(temperature, (int, float)) and not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature={shown(temperature)}: must be ≥ 0 and ≤ {MAX_TEMPERATURE:g}", param="temperature"
        )
    overrides = {name: given[name] for name in _AS_THEY_ARE & given.keys()}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            overrides["max_tokens"] = given[name]
    if "stop" in given:
        stop = given["stop"]
        overrides["stop"] = (stop,) if isinstance(stop, str) else _list("stop", stop)
    if "stop_token_ids" in given:
        overrides["stop_token_ids"] = _list("stop_token_ids", given["stop_token_ids"])
    if "logit_bias" in given:
        overrides["logit_bias"] = _logit_bias(given["logit_bias"])
    if "logprobs" in given or "top_logprobs" in given:
        overrides["logprobs"] = _logprobs(given, chat=chat)
    if given.get("prompt_logprobs", False) is not False:
        overrides["prompt_logprobs"] = given["prompt_logprobs"]
    return overrides | form_overrides(given)


def limit_field(body: Mapping[str, object]) -> str | None:
    """Return the name of the field of `body` that limits the tokens of an answer; None if none is set."""
    return next((name for name in ANSWER_LIMITS if body.get(name) is not None), None)


def stated_limit(body: Mapping[str, object]) -> int | None:
    """Return the most tokens of an answer that `body` states, unchecked: 0 for a prompt that is only scored.

    None if it states no limit, or one that is not a whole number.
    """
    name = limit_field(body)
    value = None if name is None else body[name]
    # Bounded, since JSON may contain numbers with thousands of digits.
    return min(value, MAX_TOKENS) if type(value) is int and value >= 0 else None


def deadline_seconds(body: Mapping[str, object]) -> float | None:
    """Return `deadline` or `deadline_ms` of `body` in seconds, None when neither is set. Raises `InvalidRequest`."""
    given = [name for name in ("deadline", "deadline_ms") if body.get(name) is not None]
    if not given:
        return None
    if len(given) == 2:
        raise InvalidRequest("both deadline and deadline_ms are given: give one", param="deadline")
    name, value = given[0], body[given[0]]
    unit, a_second = ("milliseconds", 1000) if name == "deadline_ms" else ("seconds", 1)
    most = MAX_DEADLINE * a_second
    # This form of the comparison also refuses NaN, which Python's own JSON parser accepts.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise InvalidRequest(f"{name} must be a number of {unit} above 0 and ≤ {most:.0e}", param=name)
    return value / a_second


def priority_of(body: Mapping[str, object]) -> int:
    """Return the priority of `body` (lower is sooner), by default `DEFAULT_PRIORITY`. Raises `InvalidRequest`."""
    priority = body.get("priority")
    return DEFAULT_PRIORITY if priority is None else _require_whole("priority", priority)


def priority_or_default(body: Mapping[str, object]) -> int:
    """Return the priority of `body`, and `DEFAULT_PRIORITY` for an invalid one, which is refused when it is read."""
    try:
        return priority_of(body)
    except InvalidRequest:
        return DEFAULT_PRIORITY


def expected_tokens(body: Mapping[str, object]) -> int | None:
    """Return how many tokens the sender of `body` expects in its answer; None if that is not given or not valid."""
    expected = body.get("expected_tokens")
    return expected if type(expected) is int and 0 <= expected <= MAX_TOKENS else None


def completions_of(body: Mapping[str, object]) -> int:
    """Return the number of completions to compute per prompt: `n`, or `best_of`. Raises `InvalidRequest`."""
    return max((_require_whole(name, body[name]) for name in ("n", "best_of") if body.get(name) is not None), default=1)


def _require_whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequest(f"{name}={shown(value)}: must be a whole number", param=name)
    low, high = RANGES[name]
    if not low <= value <= high:
        raise InvalidRequest(f"{name}={shown(value)}: must be ≥ {low} and ≤ {high}", param=name)
    return value


def _list(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name}={shown(value)}: must be a list", param=name)
    return tuple(value)


def _logit_bias(value: object) -> dict[int, object]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers", param="logit_bias")
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) <= MAX_TOKEN_DIGITS):
            raise InvalidRequest(f"logit_bias has the key {shown(token)}: must be a token id", param="logit_bias")
    return {int(token): bias for token, bias in value.items()}


def _logprobs(given: Mapping[str, object], *, chat: bool) -> object:
    wanted, top = given.get("logprobs", False), given.get("top_logprobs", 0)
    if not chat:
        if "top_logprobs" in given:
            raise InvalidRequest(
                "top_logprobs belongs to chats; in a completion logprobs is the number", param="top_logprobs"
            )
        return wanted if not isinstance(wanted, bool) else 0 if wanted else None
    if not isinstance(wanted, bool):
        raise InvalidRequest("logprobs must be true or false in a chat; their number is top_logprobs", param="logprobs")
    if not wanted and top:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return top if wanted else None
