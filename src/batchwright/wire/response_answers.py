"""Answers of `/v1/responses`: responses and the events of their streams, from the answers to chats.

A response is a list of items: a thought, a message, and calls of functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias

Body = dict[str, Any]

ItemKind: TypeAlias = Literal["reasoning", "message", "function_call"]

_PREFIXES: Mapping[ItemKind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXT_EVENTS: Mapping[ItemKind, str] = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
}


def response_of_chat(asked: Mapping[str, Any], chat: Mapping[str, Any]) -> Body:
    """Return the answer to a body for `/v1/responses`, given the answer to its chat."""
    head = _Head.of(asked, chat)
    choices: Sequence[Body] = chat["choices"]
    output: list[Body] = []
    for choice in choices:
        items = head.items(choice["message"], (choice.get("logprobs") or {}).get("content") or [])
        # An answer that ended too early did so in the last of its items.
        output += [item.body("completed") for item in items[:-1]]
        output.append(items[-1].body("incomplete" if choice["finish_reason"] == "length" else "completed"))
    is_cut = any(choice["finish_reason"] == "length" for choice in choices)
    return head.response(output, is_cut=is_cut, usage=_usage(chat["usage"]))


class ResponseEvents:
    """Makes the events of a streamed response from the chunks of its chat, which has one choice and gives its usage.

    An item ends where another one begins, so that text after a call is another message.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self._numbers = count()
        self._head: _Head | None = None
        self._open: _Item | None = None
        self._done: list[Body] = []
        self._reason: str | None = None

    def of_chunk(self, chunk: Mapping[str, Any]) -> list[Body]:
        """Return the events of a chunk of the chat; those that begin the response come with the first."""
        events: list[Body] = []
        if self._head is None:
            self._head = _Head.of(self._asked, chunk)
            begun = self._head.response([], status="in_progress")
            events += [self._event("created", response=begun), self._event("in_progress", response=begun)]
        for choice in chunk["choices"]:
            events += self._of_delta(self._head, choice["delta"])
            self._reason = choice["finish_reason"] or self._reason
        if chunk.get("usage") is not None:
            events += self._end(self._head, chunk["usage"])
        return events

    def _of_delta(self, head: _Head, delta: Mapping[str, Any]) -> list[Body]:
        events: list[Body] = []
        if text := delta.get("reasoning_content"):
            events += self._more(head, "reasoning", text)
        if text := delta.get("content"):
            events += self._more(head, "message", text)
        for call in delta.get("tool_calls") or ():
            if call.get("id") is not None:
                events += self._begin(head.call(call))
            if text := call["function"].get("arguments"):
                events += self._more(head, "function_call", text)
        return events

    def _more(self, head: _Head, kind: ItemKind, text: str) -> list[Body]:
        """Return the events of more text of the open item, or of a new one if that is of another kind."""
        events = [] if self._open is not None and self._open.kind == kind else self._begin(head.item(kind))
        if self._open is not None:
            self._open.texts.append(text)
            more: Body = {"logprobs": []} if kind == "message" else {}
            events.append(self._of_text("delta", self._open, delta=text, **more))
        return events

    def _begin(self, item: _Item) -> list[Body]:
        events = self._close("completed")
        self._open = item
        events.append(self._event("output_item.added", output_index=len(self._done), item=item.begun()))
        if item.kind != "function_call":
            events.append(self._of_part("added", item, ""))
        return events

    def _close(self, status: str) -> list[Body]:
        item = self._open
        if item is None:
            return []
        self._open, text = None, item.text
        if item.kind == "function_call":
            events = [self._of_text("done", item, name=item.name, arguments=text)]
        else:
            more: Body = {"logprobs": []} if item.kind == "message" else {}
            events = [self._of_text("done", item, text=text, **more), self._of_part("done", item, text)]
        body = item.body(status)
        events.append(self._event("output_item.done", output_index=len(self._done), item=body))
        self._done.append(body)
        return events

    def _end(self, head: _Head, usage: Mapping[str, Any]) -> list[Body]:
        is_cut = self._reason == "length"
        events = [] if self._open is not None or self._done else self._begin(head.item("message"))
        events += self._close("incomplete" if is_cut else "completed")
        response = head.response(self._done, is_cut=is_cut, usage=_usage(usage))
        return [*events, self._event("incomplete" if is_cut else "completed", response=response)]

    def _of_text(self, kind: str, item: _Item, **fields: Any) -> Body:
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return self._of_item(f"{_TEXT_EVENTS[item.kind]}.{kind}", item, **place, **fields)

    def _of_part(self, kind: str, item: _Item, text: str) -> Body:
        return self._of_item(f"content_part.{kind}", item, content_index=0, part=item.part(text))

    def _of_item(self, kind: str, item: _Item, **fields: Any) -> Body:
        return self._event(kind, item_id=item.id, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> Body:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}


@dataclass(slots=True)
class _Item:
    """An item of a response."""

    kind: ItemKind
    id: str
    texts: list[str] = field(default_factory=list)
    """Parts of its text: what is thought or said, or the arguments of a call."""
    logprobs: Sequence[Body] = ()
    name: str = ""
    """Name of the function that is called."""
    call_id: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self, text: str) -> Body:
        """Return the part of a message or a thought with this text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self.logprobs]}

    def begun(self) -> Body:
        """Return the item before there is any text of it."""
        return self._body("in_progress", "", [])

    def body(self, status: str) -> Body:
        """Return the item with all of its text."""
        content = [] if self.kind == "function_call" else [self.part(self.text)]
        return self._body(status, self.text, content)

    def _body(self, status: str, arguments: str, content: list[Body]) -> Body:
        body = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "function_call":
                return {**body, "call_id": self.call_id, "name": self.name, "arguments": arguments}
            case "reasoning":
                return {**body, "summary": [], "content": content}
            case "message":
                return {**body, "role": "assistant", "content": content}


@dataclass(frozen=True, slots=True)
class _Head:
    """What the states of one response have in common."""

    key: str
    created: int
    model: str
    asked: Mapping[str, Any]
    numbers: Mapping[ItemKind, Any] = field(default_factory=lambda: {kind: count() for kind in _PREFIXES})
    """Numbers of the items of each kind, for their ids."""

    @classmethod
    def of(cls, asked: Mapping[str, Any], chat: Mapping[str, Any]) -> _Head:
        """Return the head of the response for the answer to a chat, or a chunk of it."""
        return cls(str(chat["id"]).removeprefix("chatcmpl-"), chat["created"], chat["model"], asked)

    def item(self, kind: ItemKind, text: str | None = None, logprobs: Sequence[Body] = ()) -> _Item:
        number = next(self.numbers[kind])
        name = f"{_PREFIXES[kind]}_{self.key}{f'_{number}' if number else ''}"
        return _Item(kind, name, [] if text is None else [text], logprobs)

    def call(self, call: Mapping[str, Any]) -> _Item:
        """Return the item of a chat's call, or of the beginning of one in a stream, without its arguments."""
        item = self.item("function_call")
        item.call_id, item.name = call["id"], call["function"]["name"]
        return item

    def items(self, message: Mapping[str, Any], logprobs: Sequence[Body]) -> list[_Item]:
        """Return the items of a message, of which there is at least one."""
        items: list[_Item] = []
        if thought := message.get("reasoning_content"):
            items.append(self.item("reasoning", thought))
        calls = message.get("tool_calls") or ()
        content = message.get("content") or ""
        if content or not (items or calls):
            items.append(self.item("message", content, logprobs))
        for call in calls:
            item = self.call(call)
            item.texts.append(call["function"]["arguments"])
            items.append(item)
        return items

    def response(
        self, output: list[Body], *, status: str | None = None, is_cut: bool = False, usage: Body | None = None
    ) -> Body:
        asked = self.asked
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.created,
            "status": status or ("incomplete" if is_cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self.model,
            "output": [*output],
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (asked.get("reasoning") or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": asked.get("temperature"),
            "text": {"format": _format(asked)},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": [
                {"description": None, "parameters": None, "strict": None, **tool} for tool in asked.get("tools") or ()
            ],
            "top_p": asked.get("top_p"),
            "truncation": "disabled",
            "usage": usage,
        }


def _format(asked: Mapping[str, Any]) -> Body:
    given = (asked.get("text") or {}).get("format")
    if given is None:
        return {"type": "text"}
    return {"name": "answer", **given} if given.get("type") == "json_schema" else dict(given)


def _usage(usage: Mapping[str, Any]) -> Body:
    details = usage.get("prompt_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
