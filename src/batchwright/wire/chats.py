"""What a chat's body says besides its messages: tools, whether they may be called, and how the model is to think."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from batchwright.constraints import require_schema
from batchwright.errors import InvalidRequest, shown
from batchwright.request import ChatMessage
from batchwright.wire.bounds import MAX_LABEL, MAX_NAME
from batchwright.wire.fields import require_type

CHAT_NAMES = frozenset({"chat_template_kwargs", "parallel_tool_calls", "reasoning_effort", "tool_choice", "tools"})
"""Fields of bodies for chats that this module reads."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Values of `reasoning_effort`, as in OpenAI's API."""
TEMPLATE_OPTIONS: Mapping[str, type] = {"enable_thinking": bool, "thinking": bool, "thinking_budget": int}
"""Names that `chat_template_kwargs` may have, and the types of their values."""
NO_OPTIONS: Mapping[str, Any] = {}
TOOL_NAME = rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}"
"""Regular expression of the names of tools."""

ChoiceMode: TypeAlias = Literal["none", "auto", "required"]


class Chat(list[ChatMessage]):
    """Messages of a chat, and what else the model's chat template is given."""

    def __init__(
        self,
        messages: Iterable[ChatMessage],
        *,
        tools: tuple[Mapping[str, Any], ...] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
        effort: str | None = None,
    ) -> None:
        super().__init__(messages)
        self.tools = tools
        """Tools in OpenAI's form."""
        self.options = options
        """Variables of the template by their names, of `TEMPLATE_OPTIONS`."""
        self.effort = effort
        """How much the model is to think, one of `EFFORTS`. None: the template's default."""


@dataclass(frozen=True, slots=True)
class ChatTools:
    """Tools of a chat."""

    tools: tuple[Mapping[str, Any], ...]
    """Tools in OpenAI's form. At least one."""
    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments of the tools, by name."""
    choice: ChoiceMode
    named: str | None
    """Name of the tool that is to be called. None: any."""
    parallel: bool
    """Whether an answer may have several calls."""
    strict: frozenset[str]
    """Names of the tools whose arguments must satisfy their schemas whenever they are called."""

    @property
    def held(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas that arguments must satisfy, by the names of their tools."""
        if self.choice == "required":
            return self.schemas if self.named is None else {self.named: self.schemas[self.named]}
        strict = self.strict if self.choice == "auto" else ()
        return {name: schema for name, schema in self.schemas.items() if name in strict}


def read_chat(messages: Iterable[ChatMessage], body: Mapping[str, Any], tools: ChatTools | None) -> Chat:
    """Return the prompt of a chat with these valid messages. Raises `InvalidRequest`, naming the field."""
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort={shown(effort)}: must be one of {', '.join(EFFORTS)}", param="reasoning_effort"
        )
    offered = tools.tools if tools is not None and tools.choice != "none" else ()
    messages = [_for_template(position, message) for position, message in enumerate(messages)]
    return Chat(messages, tools=offered, options=_options(body.get("chat_template_kwargs")), effort=effort)


def read_tools(body: Mapping[str, Any]) -> ChatTools | None:
    """Return the tools of a body; None if it has none. Raises `InvalidRequest`, naming the field."""
    parallel = body.get("parallel_tool_calls")
    if parallel is not None:
        require_type("parallel_tool_calls", parallel, bool)
    given = body.get("tools")
    if given is not None:
        require_type("tools", given, list)
    schemas = _schemas(given or [])
    choice, named = _choice(body.get("tool_choice"), schemas)
    if not given:
        return None
    strict = frozenset(tool["function"]["name"] for tool in given if tool["function"].get("strict"))
    return ChatTools(tuple(given), schemas, choice, named, parallel is not False, strict)


def _schemas(tools: list[Any]) -> dict[str, Mapping[str, Any]]:
    schemas: dict[str, Mapping[str, Any]] = {}
    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        require_type(where, tool, dict)
        if tool.get("type") != "function":
            raise InvalidRequest(f"{where}.type={shown(tool.get('type'))}: must be function", param=f"{where}.type")
        require_type(f"{where}.function", function := tool.get("function"), dict)
        name = function.get("name")
        if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
            raise InvalidRequest(
                f"{where}.function.name={shown(name)}: must be 1 to {MAX_NAME} letters, digits, _, . or -",
                param=f"{where}.function.name",
            )
        if name in schemas:
            raise InvalidRequest(
                f"{where}.function.name={shown(name)} is given twice: each tool needs a name of its own",
                param=f"{where}.function.name",
            )
        for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
            if function.get(field) is not None:
                require_type(f"{where}.function.{field}", function[field], kind)
        schemas[name] = function.get("parameters") or {}
        _require_arguments(f"{where}.function.parameters", schemas[name])
    return schemas


def _require_arguments(where: str, schema: Mapping[str, Any]) -> None:
    require_schema(where, schema)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InvalidRequest(
            f"{where}.type={shown(kinds)}: must be object, since arguments have names: put the value into a property",
            param=f"{where}.type",
        )


def _choice(value: Any, schemas: Mapping[str, object]) -> tuple[ChoiceMode, str | None]:
    """Return whether a tool may or must be called, and the name of the one that must."""
    if value is None or value in ("none", "auto"):
        return value or "auto", None
    if value == "required":
        named = None
    elif isinstance(value, Mapping) and value.get("type") == "function" and isinstance(value.get("function"), Mapping):
        named = value["function"].get("name")
        if not isinstance(named, str) or named not in schemas:
            raise InvalidRequest(
                f"tool_choice.function.name={shown(named)}: must be the name of one of the tools",
                param="tool_choice.function.name",
            )
    else:
        raise InvalidRequest(
            f'tool_choice={shown(value)}: must be none, auto, required or {{"type": "function", "function": '
            '{"name": …}}',
            param="tool_choice",
        )
    if not schemas:
        raise InvalidRequest(f"tool_choice={shown(value)} needs tools", param="tool_choice")
    return "required", named


def _options(value: object) -> Mapping[str, Any]:
    if value is None:
        return NO_OPTIONS
    if not isinstance(value, Mapping):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name, option in value.items():
        where = f"chat_template_kwargs.{name}"[: MAX_LABEL // 4].encode(errors="replace").decode()
        kind = TEMPLATE_OPTIONS.get(name)
        if kind is None:
            raise InvalidRequest(
                f"{where} is not supported: of a chat template's variables {', '.join(TEMPLATE_OPTIONS)} can be set",
                param=where,
                code="unsupported_parameter",
            )
        if type(option) is not kind:
            needed = "true or false" if kind is bool else "a whole number"
            raise InvalidRequest(f"{where}={shown(option)}: must be {needed}", param=where)
    return value


def _for_template(position: int, message: ChatMessage) -> ChatMessage:
    """Return the message as chat templates expect it.

    Arguments of calls, which are texts in OpenAI's form, become objects; fields that say nothing are left out.
    """
    calls = message.get("tool_calls")
    if None in message.values() or calls == []:
        message = {name: value for name, value in message.items() if value is not None and value != []}
    if not calls:
        return message
    where = f"messages[{position}].tool_calls"
    return {**message, "tool_calls": [_call(f"{where}[{at}]", call) for at, call in enumerate(calls)]}


def _call(where: str, call: object) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a function that has a name and arguments", param=where)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        # Arguments in an answer that was cut off are not JSON: they are shown to the model as they are.
        arguments = _object_in(arguments)
    elif not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"{where}.function.arguments={shown(arguments)}: must be the text of a JSON object",
            param=f"{where}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _object_in(text: str) -> object:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
