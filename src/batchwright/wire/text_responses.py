"""`/v1/responses` in its text form: requests become chats, and `response_answers` turns their answers into responses.

What has no counterpart in a chat, such as earlier responses, tools of a provider and files, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchwright.errors import InvalidRequest, shown
from batchwright.wire.bounds import MAX_LABEL, MAX_TOOLS
from batchwright.wire.fields import check_names, require_type
from batchwright.wire.requests import required

Body = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant")
_SAME = frozenset({
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "logit_bias", "priority", "deadline", "deadline_ms",
    "expected_tokens",
    "stream", "parallel_tool_calls",
})  # fmt: skip
"""Fields that a chat has, too. Those that OpenAI's responses lack are vLLM's or our own."""
NAMES = _SAME | {"input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools"}
"""Fields that change an answer."""
REFUSED: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields without a counterpart, and their values that, like null, ask for nothing."""
TEXT_PARTS = ("input_text", "output_text", "text")
THOUGHT_PARTS = ("reasoning_text", "summary_text")
CHOICES = ("none", "auto", "required")
"""Values of `tool_choice` besides the name of a tool."""
_TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})
_FORMAT_FIELDS = ("name", "description", "schema", "strict")
_MOST_TOKENS = 2**31 - 1
_NAMES_IN_CHAT = (
    ("messages", "input"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_tokens", "max_output_tokens"),
)
"""Beginnings of the names of a chat's fields, and those of a response that correspond to them."""


def chat_of_response(body: Mapping[str, Any]) -> Body:
    """Return the body of the chat that a body for `/v1/responses` asks for; its values are checked with the chat.

    For any JSON object, raises nothing but `InvalidRequest`, naming the field.
    """
    check_names(body, frozenset(), NAMES, REFUSED)
    conversation = _Conversation()
    instructions = body.get("instructions")
    if instructions is not None:
        require_type("instructions", instructions, str)
        conversation.messages.append({"role": "system", "content": instructions})
    given = required("input", body)
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given:
        for position, item in enumerate(given):
            conversation.add(f"input[{position}]", item)
    else:
        raise InvalidRequest("input must be a text, or a list of items that is not empty", param="input")
    most = body.get("max_output_tokens")
    if most is not None and (type(most) is not int or not 1 <= most <= _MOST_TOKENS):
        raise InvalidRequest(
            f"max_output_tokens={shown(most)}: must be a whole number ≥ 1 and ≤ {_MOST_TOKENS}",
            param="max_output_tokens",
        )
    chat = {
        **{name: value for name, value in body.items() if name in _SAME},
        "messages": conversation.ended(),
        "max_tokens": most,
        "response_format": form_of_response(body),
        "reasoning_effort": _effort(body.get("reasoning")),
        "tools": _tools(body.get("tools")),
        "tool_choice": _choice(body.get("tool_choice")),
    }
    return {name: value for name, value in chat.items() if value is not None}


@contextmanager
def named_in_response() -> Iterator[None]:
    """Within this context, errors about the chat of a response name the fields of the response."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None or (name := _name_in_response(error.param)) == error.param:
            raise
        text = str(error).replace(error.param, name, 1)
        raise InvalidRequest(text, param=name, code=error.code) from error


def _name_in_response(name: str) -> str:
    if name.startswith(("tools[", "tool_choice.")):
        return name.replace(".function", "", 1)
    for theirs, ours in _NAMES_IN_CHAT:
        if name == theirs or name.startswith((f"{theirs}.", f"{theirs}[")):
            # Items of the input are not the messages one by one.
            return ours if theirs == "messages" else ours + name[len(theirs) :]
    return name


class _Conversation:
    """Messages of a chat, from the items of an input: thoughts and calls are part of an assistant's message."""

    def __init__(self) -> None:
        self.messages: list[Body] = []
        self._thought = ""
        """Thought of the assistant's message that follows."""

    def add(self, where: str, item: object) -> None:
        """Add the item at `where`. Raises `InvalidRequest`."""
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if isinstance(item, dict) and kind == "message":
            message = _message(where, item)
            if message["role"] == "assistant":
                self._add_assistant(message)
            else:
                self._add_other(message)
        elif isinstance(item, dict) and kind == "function_call":
            self._add_call(_call(where, item))
        elif isinstance(item, dict) and kind == "function_call_output":
            self._add_other(_output(where, item))
        elif isinstance(item, dict) and kind == "reasoning":
            self._thought += _thought(where, item)
        else:
            raise InvalidRequest(
                f"{where} is of type {shown(kind)}: only messages, reasoning, function_call and function_call_output "
                "are supported",
                param=where,
                code="unsupported_parameter",
            )

    def ended(self) -> list[Body]:
        """Return all messages."""
        if self._thought:
            self._add_assistant({"role": "assistant", "content": ""})
        return self.messages

    def _add_other(self, message: Body) -> None:
        self.ended()
        self.messages.append(message)

    def _add_assistant(self, message: Body) -> None:
        if self._thought:
            message["reasoning_content"], self._thought = self._thought, ""
        self.messages.append(message)

    def _add_call(self, call: Body) -> None:
        last = self.messages[-1] if self.messages else {}
        if self._thought or last.get("role") != "assistant" or len(last.get("tool_calls", ())) == MAX_TOOLS:
            self._add_assistant({"role": "assistant", "content": ""})
        self.messages[-1].setdefault("tool_calls", []).append(call)


def _message(where: str, item: Body) -> Body:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role={shown(role)}: must be one of {', '.join(ROLES)}", param=f"{where}.role")
    return {"role": role, "content": _content(f"{where}.content", item.get("content"))}


def _call(where: str, item: Body) -> Body:
    for name in ("name", "arguments"):
        require_type(f"{where}.{name}", item.get(name), str)
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": _call_id(where, item), "type": "function", "function": function}


def _output(where: str, item: Body) -> Body:
    content = _content(f"{where}.output", item.get("output"))
    return {"role": "tool", "tool_call_id": _call_id(where, item), "content": content}


def _call_id(where: str, item: Body) -> str:
    given = item.get("call_id")
    if not isinstance(given, str) or not 1 <= len(given) <= MAX_LABEL:
        raise InvalidRequest(
            f"{where}.call_id={shown(given)}: must be a text of 1 to {MAX_LABEL} characters", param=f"{where}.call_id"
        )
    return given


def _thought(where: str, item: Body) -> str:
    """Return the thought, or its summary if there is nothing else."""
    if item.get("encrypted_content") is not None:
        raise InvalidRequest(
            f"{where}.encrypted_content is not supported: leave it out",
            param=f"{where}.encrypted_content",
            code="unsupported_parameter",
        )
    texts = [_content(f"{where}.{name}", item.get(name) or [], THOUGHT_PARTS) for name in ("content", "summary")]
    return texts[0] or texts[1]


def _content(where: str, content: object, kinds: tuple[str, ...] = TEXT_PARTS) -> str:
    if isinstance(content, list):
        return "".join(_text_of(f"{where}[{position}]", part, kinds) for position, part in enumerate(content))
    if not isinstance(content, str) or kinds is not TEXT_PARTS:
        raise InvalidRequest(f"{where} must be a text or a list of text parts", param=where)
    return content


def _text_of(where: str, part: object, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in kinds:
        raise InvalidRequest(
            f"{where} is of type {shown(kind)}: only text is supported", param=where, code="unsupported_parameter"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text={shown(text)}: must be a text", param=f"{where}.text")
    return text


def form_of_response(body: Mapping[str, Any]) -> Body | None:
    """Return the form of the answer that the field `text` of a body asks for, as a chat has it; None: it does not say.

    Raises `InvalidRequest`.
    """
    form = _only("text", body.get("text"), ("format",)).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            f"text.format={shown(form)}: must be an object whose type is text, json_object or json_schema",
            param="text.format",
            code="unsupported_parameter",
        )
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: form[name] for name in _FORMAT_FIELDS if form.get(name) is not None}}


def _effort(options: object) -> object:
    return _only("reasoning", options, ("effort",)).get("effort")


def _only(where: str, options: object, names: tuple[str, ...]) -> Body:
    """Return the fields of an option. Raises `InvalidRequest` if it has others than `names` that are not null."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidRequest(f"{where}={shown(options)}: must be an object", param=where)
    for name, value in options.items():
        if name not in names and value is not None:
            raise InvalidRequest(
                f"{where}.{name}={shown(value)} is not supported: leave it out",
                param=where,
                code="unsupported_parameter",
            )
    return options


def _tools(tools: object) -> list[Body] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise InvalidRequest(f"tools={shown(tools)}: must be a list", param="tools")
    return [_tool(f"tools[{position}]", tool) for position, tool in enumerate(tools)]


def _tool(where: str, tool: object) -> Body:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if not isinstance(tool, dict) or kind != "function":
        raise InvalidRequest(
            f"{where} is of type {shown(kind)}: only functions are supported",
            param=where,
            code="unsupported_parameter",
        )
    for name, value in tool.items():
        # Other fields, such as defer_loading, do not matter as long as they ask for nothing.
        if name not in _TOOL_FIELDS and value is not None and value is not False:
            raise InvalidRequest(
                f"{where} has {shown(name)}, which is not supported: leave it out",
                param=where,
                code="unsupported_parameter",
            )
    function = {name: value for name, value in tool.items() if name in _TOOL_FIELDS - {"type"} and value is not None}
    return {"type": "function", "function": function}


def _choice(choice: object) -> object:
    if choice is None or choice in CHOICES:
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise InvalidRequest(
        f'tool_choice={shown(choice)}: must be none, auto, required or {{"type": "function", "name": …}}',
        param="tool_choice",
        code="unsupported_parameter",
    )
