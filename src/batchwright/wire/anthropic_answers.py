"""Answers, streams and errors of Anthropic's Messages API in OpenAI's form of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

import msgspec

Body: TypeAlias = dict[str, Any]

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""HTTP statuses by type of error."""
_SERVICE_TIERS = {"standard": "default", "priority": "priority"}
_encode = msgspec.json.Encoder().encode


def openai_body(message: Mapping[str, Any], created: int) -> Body:
    """Return the body of a chat completion for a message that arrived at the Unix second `created`.

    Blocks that a translated request cannot produce, such as those of server tools, are left out.
    """
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Body] = []
    for block in _objects(message.get("content")):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block.get("text")))
        elif kind == "thinking":
            thoughts.append(_text(block.get("thinking")))
        elif kind == "tool_use":
            calls.append(_call(block, _encode(block.get("input") or {}).decode()))
    answer: Body = {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        "refusal": _refusal(message.get("stop_details")),
    }
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    choice = {"index": 0, "message": answer, "logprobs": None, "finish_reason": _reason(message.get("stop_reason"))}
    usage = message.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    is_known = _is_count(usage.get("input_tokens")) and _is_count(usage.get("output_tokens"))
    return {
        "id": message.get("id"),
        "object": "chat.completion",
        "created": created,
        "model": message.get("model"),
        "choices": [choice],
        # None rather than zeros, which would mean that it cost nothing.
        "usage": openai_usage(usage) if is_known else None,
        **_service_tier(usage),
    }


def openai_usage(usage: Mapping[str, Any]) -> Body:
    """Return the `usage` of a chat completion for that of a message, whose `input_tokens` exclude cached ones.

    `cache_creation`, which says how long the written tokens are kept, is passed on if the endpoint states it.
    """
    cached, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    prompt, generated = _count(usage, "input_tokens") + cached + written, _count(usage, "output_tokens")
    counts: Body = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
    }
    details = usage.get("output_tokens_details")
    if isinstance(details, Mapping):
        counts["completion_tokens_details"] = {"reasoning_tokens": _count(details, "thinking_tokens")}
    if isinstance(usage.get("cache_creation"), Mapping):
        counts["cache_creation"] = usage["cache_creation"]
    return counts


def openai_error(error: Mapping[str, object]) -> dict[str, object]:
    """Return an error object of Anthropic's in OpenAI's form, with the most specific code that it has."""
    kind = str(error.get("type") or "api_error")
    details = error.get("details")
    named = details.get("error_code") if isinstance(details, Mapping) else None
    # OpenAI's name for an unpaid bill, on which retries depend.
    code = "insufficient_quota" if kind == "billing_error" else named or error.get("code") or kind
    return {"message": error.get("message"), "type": kind, "param": error.get("param"), "code": str(code)}


def status_of_error(error: Mapping[str, object]) -> int | None:
    """Return the status with which an error of this `type` is answered; None if that is not known."""
    return _STATUSES.get(str(error.get("type")))


@dataclass(slots=True)
class MessageChunks:
    """Makes the chunks of a chat completion from the events of one stream, in order. Unknown events make none.

    After `message_stop` the last chunk has the `usage`, which OpenAI sends only on request.
    """

    created: int
    """Unix second at which the answer began."""
    _head: Body = field(default_factory=dict)
    _usage: Body = field(default_factory=dict)
    _calls: dict[object, int] = field(default_factory=dict)
    """Numbers of tool calls by the index of their block."""
    _inputs: dict[object, str] = field(default_factory=dict)
    """Arguments of tool calls that came whole, at the start of their block, and may yet be replaced by deltas."""

    def of(self, event: Mapping[str, Any]) -> list[Body]:
        """Return the chunks for one event."""
        kind, index = event.get("type"), event.get("index")
        if kind == "message_start":
            return self._start(_object(event.get("message")))
        if kind == "content_block_start":
            return self._block(index, _object(event.get("content_block")))
        if kind == "content_block_delta":
            return self._delta(index, _object(event.get("delta")))
        if kind == "content_block_stop":
            whole = self._inputs.pop(index, None)
            return [] if whole is None else [self._arguments(index, whole)]
        if kind == "message_delta":
            return self._end(_object(event.get("delta")), _object(event.get("usage")))
        if kind == "message_stop":
            return [{**self._head, "choices": [], "usage": openai_usage(self._usage)}]
        return []

    def _start(self, message: Mapping[str, Any]) -> list[Body]:
        self._usage.update(_object(message.get("usage")))
        self._head = {
            "id": message.get("id"),
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": message.get("model"),
            **_service_tier(self._usage),
        }
        return [self._chunk({"role": "assistant", "content": ""})]

    def _block(self, index: object, block: Mapping[str, Any]) -> list[Body]:
        kind = block.get("type")
        if kind == "tool_use":
            number = self._calls.setdefault(index, len(self._calls))
            self._inputs[index] = _encode(block.get("input") or {}).decode()
            return [self._chunk({"tool_calls": [{"index": number, **_call(block, "")}]})]
        name = {"text": "text", "thinking": "thinking"}.get(str(kind))
        return [] if name is None else self._text_chunks(name, block.get(name))

    def _delta(self, index: object, delta: Mapping[str, Any]) -> list[Body]:
        kind = delta.get("type")
        if kind == "text_delta":
            return self._text_chunks("text", delta.get("text"))
        if kind == "thinking_delta":
            return self._text_chunks("thinking", delta.get("thinking"))
        if kind == "input_json_delta" and index in self._calls and (part := _text(delta.get("partial_json"))):
            self._inputs.pop(index, None)
            return [self._arguments(index, part)]
        return []

    def _end(self, delta: Mapping[str, Any], usage: Mapping[str, Any]) -> list[Body]:
        # Counts are totals; a null says nothing.
        self._usage.update({name: value for name, value in usage.items() if value is not None})
        if delta.get("stop_reason") is None:
            return []
        refusal = _refusal(delta.get("stop_details"))
        content = {} if refusal is None else {"refusal": refusal}
        return [self._chunk(content, _reason(delta["stop_reason"]))]

    def _text_chunks(self, name: str, text: object) -> list[Body]:
        key = "content" if name == "text" else "reasoning_content"
        return [self._chunk({key: text})] if isinstance(text, str) and text else []

    def _arguments(self, index: object, part: str) -> Body:
        return self._chunk({"tool_calls": [{"index": self._calls[index], "function": {"arguments": part}}]})

    def _chunk(self, delta: Body, reason: str | None = None) -> Body:
        return {**self._head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}


def _call(block: Mapping[str, Any], arguments: str) -> Body:
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _reason(stop_reason: object) -> str | None:
    """Return OpenAI's name of a reason; an unknown reason keeps its own."""
    return None if stop_reason is None else _FINISH_REASONS.get(str(stop_reason), str(stop_reason))


def _refusal(details: object) -> str | None:
    explanation = details.get("explanation") if isinstance(details, Mapping) else None
    return explanation if isinstance(explanation, str) else None


def _service_tier(usage: Mapping[str, Any]) -> Body:
    tier = _SERVICE_TIERS.get(str(usage.get("service_tier")))
    return {} if tier is None else {"service_tier": tier}


def _count(values: Mapping[str, Any], name: str) -> int:
    count = values.get(name)
    return count if _is_count(count) else 0


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
