"""`/v1/responses` in its text form: its requests as chats, and the answers to those chats as responses.

What has no counterpart in a chat, such as earlier responses, tools, reasoning and files, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from batchwright.errors import InvalidRequest, shown
from batchwright.wire.fields import check_names
from batchwright.wire.requests import required

Body = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant")
_SAME = frozenset({
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "logit_bias", "priority", "deadline", "deadline_ms",
    "stream",
})  # fmt: skip
"""Fields that a chat has, too. Those that OpenAI's responses lack are vLLM's or our own."""
NAMES = _SAME | {"input", "instructions", "max_output_tokens", "text"}
"""Fields that change an answer."""
REFUSED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields without a counterpart, and their values that, like null, ask for nothing."""
TEXT_PARTS = ("input_text", "output_text", "text")
_MOST_TOKENS = 2**31 - 1


def chat_of_response(body: Mapping[str, Any]) -> Body:
    """Return the body of the chat that a body for `/v1/responses` asks for; its values are checked with the chat.

    Raises `InvalidRequest`, naming the field, and nothing else, for any JSON object.
    """
    check_names(body, frozenset(), NAMES, REFUSED)
    messages: list[Body] = []
    instructions = body.get("instructions")
    if instructions is not None:
        if not isinstance(instructions, str):
            raise InvalidRequest(f"instructions={shown(instructions)}: must be a text", param="instructions")
        messages.append({"role": "system", "content": instructions})
    given = required("input", body)
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        messages += [_message(f"input[{position}]", item) for position, item in enumerate(given)]
    else:
        raise InvalidRequest("input must be a text, or a list of messages that is not empty", param="input")
    _require_text(body.get("text"))
    most = body.get("max_output_tokens")
    if most is not None and (type(most) is not int or not 1 <= most <= _MOST_TOKENS):
        raise InvalidRequest(
            f"max_output_tokens={shown(most)}: must be a whole number ≥ 1 and ≤ {_MOST_TOKENS}",
            param="max_output_tokens",
        )
    chat = {name: value for name, value in body.items() if name in _SAME and value is not None}
    if (body.get("text") or {}).get("format") is not None:
        chat["response_format"] = {"type": "text"}  # and not the form of a job
    return {**chat, "messages": messages, **({} if most is None else {"max_tokens": most})}


def response_of_chat(asked: Mapping[str, Any], chat: Mapping[str, Any]) -> Body:
    """Return the answer to a body for `/v1/responses`, given that to its chat."""
    key = str(chat["id"]).removeprefix("chatcmpl-")
    choices: Sequence[Body] = chat["choices"]
    head = _Head(key, chat["created"], chat["model"], asked)
    output = [
        _item(
            head.item_id(choice["index"]),
            choice["message"]["content"],
            choice["finish_reason"],
            (choice.get("logprobs") or {}).get("content") or [],
        )
        for choice in choices
    ]
    return head.response(output, is_cut=_is_cut(choices), usage=_usage(chat["usage"]))


class ResponseEvents:
    """Makes the events of a streamed response from the chunks of its chat, which has one choice and gives its usage."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._numbers = count()
        self._head: _Head | None = None
        self._text: list[str] = []
        self._reason: str | None = None

    def of_chunk(self, chunk: Mapping[str, Any]) -> list[Body]:
        """Return the events of a chunk of the chat; those that begin the response come with the first."""
        events: list[Body] = []
        if self._head is None:
            key = str(chunk["id"]).removeprefix("chatcmpl-")
            self._head = _Head(key, chunk["created"], chunk["model"], self._asked)
            events += self._beginning(self._head)
        for choice in chunk["choices"]:
            if delta := choice["delta"].get("content"):
                self._text.append(delta)
                events.append(self._of_part("output_text.delta", self._head, delta=delta, logprobs=[]))
            self._reason = choice["finish_reason"] or self._reason
        if chunk.get("usage") is not None:
            events += self._end(self._head, chunk["usage"])
        return events

    def _beginning(self, head: _Head) -> list[Body]:
        begun = head.response([], status="in_progress")
        return [
            self._event("created", response=begun),
            self._event("in_progress", response=begun),
            self._event("output_item.added", output_index=0, item=_item(head.item_id(0), None, None)),
            self._of_part("content_part.added", head, part=_part("")),
        ]

    def _end(self, head: _Head, usage: Mapping[str, Any]) -> list[Body]:
        text, is_cut = "".join(self._text), self._reason == "length"
        item = _item(head.item_id(0), text, self._reason)
        response = head.response([item], is_cut=is_cut, usage=_usage(usage))
        return [
            self._of_part("output_text.done", head, text=text, logprobs=[]),
            self._of_part("content_part.done", head, part=_part(text)),
            self._event("output_item.done", output_index=0, item=item),
            self._event("incomplete" if is_cut else "completed", response=response),
        ]

    def _of_part(self, kind: str, head: _Head, **fields: Any) -> Body:
        return self._event(kind, item_id=head.item_id(0), output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Body:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}


@dataclass(frozen=True, slots=True)
class _Head:
    """What the states of one response have in common."""

    key: str
    created: int
    model: str
    asked: Mapping[str, Any]

    def item_id(self, index: int) -> str:
        return f"msg_{self.key}" if index == 0 else f"msg_{self.key}_{index}"

    def response(
        self, output: list[Body], *, status: str | None = None, is_cut: bool = False, usage: Body | None = None
    ) -> Body:
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status or ("incomplete" if is_cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": self.asked.get("instructions"),
            "max_output_tokens": self.asked.get("max_output_tokens"),
            "metadata": self.asked.get("metadata") or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self.asked.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.asked.get("top_p"),
            "truncation": "disabled",
            "usage": usage,
        }


def _item(item_id: str, text: str | None, reason: str | None, logprobs: Sequence[Body] = ()) -> Body:
    """Return the item of a message; without a text it has just begun."""
    status = "in_progress" if text is None else "incomplete" if reason == "length" else "completed"
    content = [] if text is None else [_part(text, logprobs)]
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _part(text: str, logprobs: Sequence[Body] = ()) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _is_cut(choices: Sequence[Body]) -> bool:
    return any(choice["finish_reason"] == "length" for choice in choices)


def _usage(usage: Mapping[str, Any]) -> Body:
    details = usage.get("prompt_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _message(where: str, item: object) -> Body:
    kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
    if not isinstance(item, dict) or kind != "message":
        raise InvalidRequest(
            f"{where} is of type {shown(kind)}: only messages are supported", param=where, code="unsupported_parameter"
        )
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role={shown(role)}: must be one of {', '.join(ROLES)}", param=f"{where}.role")
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(f"{where}.content[{position}]", part) for position, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a text or a list of text parts", param=f"{where}.content")
    return {"role": role, "content": content}


def _text_of(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{where} is of type {shown(kind)}: only text is supported", param=where, code="unsupported_parameter"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text={shown(text)}: must be a text", param=f"{where}.text")
    return text


def _require_text(options: object) -> None:
    """Raise `InvalidRequest` unless the option `text` asks for plain text."""
    if options is None:
        return
    if not isinstance(options, dict):
        raise InvalidRequest(f"text={shown(options)}: must be an object", param="text")
    for name, value in options.items():
        if name == "format" and (value is None or (isinstance(value, dict) and value.get("type") == "text")):
            continue
        if value is not None:
            raise InvalidRequest(
                f"text.{name}={shown(value)}: only a format of type text is supported; leave it out",
                param=f"text.{name}" if name == "format" else "text",
                code="unsupported_parameter",
            )
