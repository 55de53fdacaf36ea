"""Translation of bodies of OpenAI chats into bodies of Anthropic's Messages API, field by field.

A field is translated, dropped because no answer depends on it, or refused by name: nothing is lost silently. Three
fields of Anthropic's own are accepted besides OpenAI's, as in its compatible endpoint: `top_k`, `thinking`, and
`cache_control` at the top, on parts and on tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from batchwright.errors import InvalidRequest, shown
from batchwright.wire.answer_forms import FORM_NAMES
from batchwright.wire.fields import IGNORED, REFUSED, check_names, require_type

Body: TypeAlias = dict[str, Any]

_AS_THEY_ARE = ("model", "top_p", "top_k", "stream", "thinking", "cache_control")
_TRANSLATED = frozenset({
    "messages", "max_tokens", "max_completion_tokens", "temperature", "stop", "tools", "tool_choice",
    "parallel_tool_calls", "user", "safety_identifier", "reasoning_effort", "response_format", "service_tier",
})  # fmt: skip
TAKEN = _TRANSLATED.union(_AS_THEY_ARE)
"""Fields whose meaning is sent."""
DROPPED = IGNORED.keys() - TAKEN - {"store"}
"""Fields that are not sent, since no answer depends on them: labels, and hints for a cache or for speed."""
_NO_COUNTERPART: Mapping[str, tuple[object, ...]] = {
    **{name: values for name, values in REFUSED.items() if name not in TAKEN},
    **{name: () for name in FORM_NAMES if name not in TAKEN},
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (False,),
    "repetition_penalty": (1,),
    "seed": (),
    "stop_token_ids": ([],),
    "top_logprobs": (0,),
}
"""Fields without a counterpart, and their values that, like null, ask for nothing. `store` is checked by itself."""
_OURS = frozenset({"deadline", "deadline_ms", "expected_tokens", "priority"})
"""Fields for the program that sends the body."""
_WHY = "has no counterpart in Anthropic's Messages API"

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_SERVICE_TIERS = {"auto": "auto", "default": "standard_only"}
_MAX_TEMPERATURE = 1.0
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_PDF = "application/pdf"
_NO_SCHEMA: Body = {"type": "object", "properties": {}}

_DROPPED_OF_MESSAGES: Mapping[str, frozenset[str]] = {
    # Parts of answers besides the text: reasoning is not sent back without its signature, which OpenAI's form lacks.
    "assistant": frozenset({"annotations", "reasoning", "reasoning_content"}),
    "tool": frozenset({"name"}),
}
_FIELDS_OF_MESSAGES: Mapping[str, frozenset[str]] = {
    "system": frozenset(),
    "developer": frozenset(),
    "user": frozenset(),
    "assistant": frozenset({"refusal", "tool_calls"}),
    "tool": frozenset({"tool_call_id"}),
}
"""Fields of a message by its role, besides `role` and `content`."""


def messages_body(body: Mapping[str, Any]) -> Body:
    """Return the body for `/v1/messages` of a body for `/v1/chat/completions`.

    Raises `InvalidRequest` naming a field that has no counterpart, is unknown, or cannot be translated.
    """
    check_names(body, TAKEN, _OURS, _NO_COUNTERPART, why=_WHY)
    if body.get("store"):
        raise _refused("store", body["store"], _WHY)
    given = {name: value for name, value in body.items() if value is not None}
    sent = {name: given[name] for name in _AS_THEY_ARE if name in given}
    sent["max_tokens"] = _max_tokens(given)
    system, sent["messages"] = _conversation(given.get("messages"))
    if system:
        sent["system"] = system[0]["text"] if len(system) == 1 and system[0].keys() == {"type", "text"} else system
    if "temperature" in given:
        sent["temperature"] = _temperature(given["temperature"])
    if (stop := _stops(given.get("stop"))) is not None:
        sent["stop_sequences"] = stop
    sent |= _tools(given)
    if (labels := [name for name in ("safety_identifier", "user") if name in given]) != []:
        sent["metadata"] = {"user_id": _text(labels[0], given[labels[0]])}
    if (tier := given.get("service_tier")) is not None:
        if not isinstance(tier, str) or tier not in _SERVICE_TIERS:
            raise _refused("service_tier", tier, f"{_WHY}, only auto and default have one")
        sent["service_tier"] = _SERVICE_TIERS[tier]
    return sent | _output_config(given)


class CachedPrefix(NamedTuple):
    """The beginning of a prompt that its provider is asked to cache."""

    tools: Sequence[object]
    """Tools of the body; all of them if messages follow."""
    messages: Sequence[Mapping[str, Any]]
    is_hourly: bool
    """Whether it is to be kept for an hour rather than five minutes."""


def cached_prefixes(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[CachedPrefix]:
    """Return the prefixes of the tools of OpenAI's `body` and its `messages` that are to be cached, the shortest first.

    Each ends with a tool or a part that is marked with `cache_control`; one of the body itself marks the last part.
    """
    tools = _list(body.get("tools"))
    found = [
        CachedPrefix(tools[:end], (), is_hourly)
        for end, tool in enumerate(tools, 1)
        if (is_hourly := _mark(tool)) is not None
    ]
    for place, message in enumerate(messages):
        parts = _list(message.get("content"))
        found += [
            CachedPrefix(tools, [*messages[:place], {**message, "content": parts[:end]}], is_hourly)
            for end, part in enumerate(parts, 1)
            if (is_hourly := _mark(part)) is not None
        ]
    control = body.get("cache_control")
    return found if control is None else [*found, CachedPrefix(tools, messages, _is_hourly(control))]


def _mark(part: object) -> bool | None:
    """Return whether a mark in a part asks to keep it for an hour; None if nothing is marked."""
    if not isinstance(part, Mapping):
        return None
    if (control := part.get("cache_control")) is not None:
        return _is_hourly(control)
    return next((mark for each in _list(part.get("content")) if (mark := _mark(each)) is not None), None)


def _is_hourly(control: object) -> bool:
    return isinstance(control, Mapping) and control.get("ttl") == "1h"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _max_tokens(given: Mapping[str, Any]) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        if (limit := given.get(name)) is not None:
            if type(limit) is not int or limit < 1:
                raise InvalidRequest(f"{name}={shown(limit)}: must be a whole number above 0", param=name)
            return limit
    raise InvalidRequest(
        "max_tokens is missing: Anthropic's Messages API needs a limit in every request; add it to the body, or give "
        "all lines of a run one with --max-tokens",
        param="max_tokens",
        code="missing_required_parameter",
    )


def _temperature(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature={shown(value)}: must be ≥ 0 and ≤ {_MAX_TEMPERATURE:g} in Anthropic's Messages API",
            param="temperature",
        )
    return value


def _stops(value: object) -> list[str] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
        raise InvalidRequest(f"stop={shown(value)}: must be a text or a list of texts", param="stop")
    return list(stops) or None


def _output_config(given: Mapping[str, Any]) -> Body:
    """Return `output_config` and `thinking`, as `reasoning_effort` and `response_format` ask for them."""
    config: Body = {}
    thinking: Body = {}
    if (effort := given.get("reasoning_effort")) is not None:
        if effort == "none":
            if "thinking" in given:
                raise _refused("reasoning_effort", effort, "contradicts thinking")
            thinking = {"thinking": {"type": "disabled"}}
        elif effort in _EFFORTS:
            config["effort"] = effort
        else:
            raise _refused("reasoning_effort", effort, f"{_WHY}, only none, {', '.join(_EFFORTS)} have one")
    if (wanted := given.get("response_format")) is not None and wanted != {"type": "text"}:
        config["format"] = _format(wanted)
    return thinking | ({"output_config": config} if config else {})


def _format(wanted: object) -> Body:
    name = "response_format"
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        kind = wanted.get("type") if isinstance(wanted, dict) else wanted
        raise InvalidRequest(
            f"{name}={shown(kind)}: {_WHY}, only text and json_schema have one",
            param=name,
            code="unsupported_parameter",
        )
    _only(name, wanted, {"type", "json_schema"})
    given = _object(f"{name}.json_schema", wanted.get("json_schema"))
    # The name is a label; a schema is always followed, so `strict` has nothing to add.
    _only(f"{name}.json_schema", given, {"name", "strict", "schema", "description"})
    schema = _object(f"{name}.json_schema.schema", given.get("schema"))
    description = given.get("description")
    return {"type": "json_schema", "schema": schema if description is None else {"description": description, **schema}}


# Messages.


def _conversation(messages: object) -> tuple[list[Body], list[Body]]:
    """Return the blocks of all system messages, and the other messages."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    system: list[Body] = []
    others: list[Body] = []
    before = ""
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = _role(where, message)
        if role in ("system", "developer"):
            system += _texts(f"{where}.content", message.get("content"))
        elif role == "user":
            others.append({"role": "user", "content": _user_content(f"{where}.content", message.get("content"))})
        elif role == "assistant":
            others.append({"role": "assistant", "content": _assistant_content(where, message)})
        else:
            # The results of parallel calls belong in one message.
            if before != "tool":
                others.append({"role": "user", "content": []})
            others[-1]["content"].append(_tool_result(where, message))
        before = role
    if not others:
        raise InvalidRequest(
            "messages has only system messages: Anthropic's Messages API needs another", param="messages"
        )
    return system, others


def _role(where: str, message: object) -> str:
    """Return the role of a message, after a check of the names of its fields."""
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        raise InvalidRequest(f"{where} must be an object with a role and content", param=where)
    if role not in _FIELDS_OF_MESSAGES:
        raise _refused(f"{where}.role", role, f"{_WHY}, only {', '.join(_FIELDS_OF_MESSAGES)} have one")
    known = _FIELDS_OF_MESSAGES[role] | _DROPPED_OF_MESSAGES.get(role, frozenset())
    _only(where, message, known | {"role", "content"})
    return role


def _texts(where: str, content: object) -> list[Body]:
    """Return the blocks of a content that can only be text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [_part(f"{where}[{position}]", part, ("text",)) for position, part in enumerate(_parts(where, content))]


def _user_content(where: str, content: object) -> str | list[Body]:
    if isinstance(content, str):
        return content
    kinds = ("text", "image_url", "file")
    return [_part(f"{where}[{position}]", part, kinds) for position, part in enumerate(_parts(where, content))]


def _assistant_content(where: str, message: Mapping[str, Any]) -> str | list[Body]:
    content, refusal = message.get("content"), message.get("refusal")
    calls = message.get("tool_calls") or []
    require_type(f"{where}.tool_calls", calls, list)
    blocks: list[Body] = []
    if isinstance(content, str):
        if not calls and refusal is None:
            return content
        # Beside calls, an empty text stands for none, and an empty block is refused.
        blocks = _texts(where, content) if content else []
    elif content is not None:
        parts = _parts(f"{where}.content", content)
        kinds = ("text", "refusal")
        blocks = [_part(f"{where}.content[{position}]", part, kinds) for position, part in enumerate(parts)]
    if refusal is not None:
        blocks.append({"type": "text", "text": _text(f"{where}.refusal", refusal)})
    blocks += [_tool_use(f"{where}.tool_calls[{position}]", call) for position, call in enumerate(calls)]
    if not blocks:
        raise InvalidRequest(f"{where} has neither content nor tool_calls", param=where)
    return blocks


def _tool_use(where: str, call: object) -> Body:
    given = _object(where, call)
    if given.get("type", "function") != "function":
        raise _refused(f"{where}.type", given["type"], _WHY)
    _only(where, given, {"id", "type", "function", "index"})
    function = _object(f"{where}.function", given.get("function"))
    _only(f"{where}.function", function, {"name", "arguments"})
    arguments = function.get("arguments") or "{}"
    try:
        value = msgspec.json.decode(_text(f"{where}.function.arguments", arguments))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{where}.function.arguments={shown(arguments)}: must be a JSON object as text",
            param=f"{where}.function.arguments",
        )
    name, call_id = _text(f"{where}.function.name", function.get("name")), _text(f"{where}.id", given.get("id"))
    return {"type": "tool_use", "id": call_id, "name": name, "input": value}


def _tool_result(where: str, message: Mapping[str, Any]) -> Body:
    call_id, content = _text(f"{where}.tool_call_id", message.get("tool_call_id")), message.get("content")
    result = content if isinstance(content, str) else _texts(f"{where}.content", content)
    return {"type": "tool_result", "tool_use_id": call_id, "content": result}


def _parts(where: str, content: object) -> list[Any]:
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a text or a list of parts", param=where)
    return content


def _part(where: str, part: object, kinds: Sequence[str]) -> Body:
    """Return the block of a part of a content, which may be of these kinds."""
    given = _object(where, part)
    kind = given.get("type")
    if kind not in kinds:
        raise InvalidRequest(
            f"{where} is a part of type {shown(kind)}: it must be {' or '.join(kinds)} here",
            param=where,
            code="unsupported_parameter",
        )
    assert isinstance(kind, str)
    _only(where, given, {"type", kind, "cache_control", "prompt_cache_breakpoint"})
    if kind == "image_url":
        block = _image(where, given.get("image_url"))
    elif kind == "file":
        block = _document(where, given.get("file"))
    else:
        block = {"type": "text", "text": _text(f"{where}.{kind}", given.get(kind))}
    return block | _cache_control(where, given)


def _cache_control(where: str, given: Mapping[str, Any]) -> Body:
    if (control := given.get("cache_control")) is not None:
        return {"cache_control": control}
    if (mark := given.get("prompt_cache_breakpoint")) is None:
        return {}
    # Anthropic keeps what is cached for 5 minutes or an hour, OpenAI for other times.
    _only(f"{where}.prompt_cache_breakpoint", _object(f"{where}.prompt_cache_breakpoint", mark), {"mode"})
    return {"cache_control": {"type": "ephemeral"}}


def _image(where: str, image: object) -> Body:
    given = _object(f"{where}.image_url", image)
    _only(f"{where}.image_url", given, {"url", "detail"})
    if given.get("detail") not in (None, "auto"):
        raise _refused(f"{where}.image_url.detail", given["detail"], _WHY)
    url = _text(f"{where}.image_url.url", given.get("url"))
    if url.startswith(("https://", "http://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "image", "source": _data(f"{where}.image_url.url", url, _IMAGES)}


def _document(where: str, file: object) -> Body:
    given = _object(f"{where}.file", file)
    _only(f"{where}.file", given, {"file_data", "filename"})
    data = _text(f"{where}.file.file_data", given.get("file_data"))
    block: Body = {"type": "document", "source": _data(f"{where}.file.file_data", data, (_PDF,))}
    return block if given.get("filename") is None else block | {"title": given["filename"]}


def _data(where: str, url: str, kinds: Sequence[str]) -> Body:
    """Return the source of a data URL such as `data:image/png;base64,…`."""
    head, comma, data = url.partition(",")
    kind, *parameters = head.removeprefix("data:").split(";")
    if not (url.startswith("data:") and comma and kind.lower() in kinds and parameters[-1:] == ["base64"]):
        raise InvalidRequest(
            f"{where} begins with {shown(url[:40])}: it must be a data URL in base64 of {', '.join(kinds)}, or for an "
            "image an http URL",
            param=where,
        )
    return {"type": "base64", "media_type": kind.lower(), "data": data}


# Tools.


def _tools(given: Mapping[str, Any]) -> Body:
    tools, choice = given.get("tools") or [], given.get("tool_choice")
    require_type("tools", tools, list)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"tool_choice={shown(choice)} needs tools", param="tool_choice")
        return {}
    sent: Body = {"tools": [_tool(f"tools[{position}]", tool) for position, tool in enumerate(tools)]}
    chosen = None if choice is None else _tool_choice(choice)
    if given.get("parallel_tool_calls") is False and chosen != {"type": "none"}:
        chosen = {**(chosen or {"type": "auto"}), "disable_parallel_tool_use": True}
    return sent if chosen is None else sent | {"tool_choice": chosen}


def _tool(where: str, tool: object) -> Body:
    given = _object(where, tool)
    if given.get("type") != "function":
        raise _refused(f"{where}.type", given.get("type"), f"{_WHY}, only function has one")
    _only(where, given, {"type", "function", "cache_control"})
    function = _object(f"{where}.function", given.get("function"))
    _only(f"{where}.function", function, {"name", "description", "parameters", "strict"})
    sent: Body = {"name": _text(f"{where}.function.name", function.get("name"))}
    if function.get("description") is not None:
        sent["description"] = function["description"]
    parameters = function.get("parameters")
    sent["input_schema"] = _NO_SCHEMA if not parameters else _object(f"{where}.function.parameters", parameters)
    if function.get("strict"):
        sent["strict"] = True
    return sent | _cache_control(where, given)


def _tool_choice(choice: object) -> Body:
    simple = {"auto": "auto", "none": "none", "required": "any"}
    if isinstance(choice, str) and choice in simple:
        return {"type": simple[choice]}
    if isinstance(choice, dict) and choice.get("type") == "function":
        _only("tool_choice", choice, {"type", "function"})
        function = _object("tool_choice.function", choice.get("function"))
        return {"type": "tool", "name": _text("tool_choice.function.name", function.get("name"))}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    raise _refused("tool_choice", kind, f"{_WHY}, only auto, none, required and function have one")


# Checks.


def _object(where: str, value: object) -> dict[str, Any]:
    require_type(where, value, dict)
    return cast("dict[str, Any]", value)


def _text(where: str, value: object) -> str:
    require_type(where, value, str)
    return cast("str", value)


def _only(where: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `InvalidRequest` for a field of an object that is not `known`, unless it is null."""
    for name in value.keys() - set(known):
        if value[name] is not None:
            path = f"{where}.{name[:40]}"
            raise InvalidRequest(f"{path} {_WHY}: leave it out", param=path, code="unsupported_parameter")


def _refused(where: str, value: object, why: str) -> InvalidRequest:
    return InvalidRequest(f"{where}={shown(value)} {why}: leave it out", param=where, code="unsupported_parameter")
