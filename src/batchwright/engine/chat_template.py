"""The chat template of a model: what it can say, and the text that it makes of a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from batchwright.errors import InvalidRequest
from batchwright.wire.chats import Chat
from batchwright.wire.tool_calls.formats import ThoughtMarks, ToolFormat, thought_marks, tool_format

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that turn thinking on and off."""
_ADDED_ARGUMENTS = re.compile(r"""arguments(['"]\])?\s*\+""")
"""Where a template concatenates the arguments of a call to a text, so that they must be text themselves."""


class ChatTemplate:
    """The chat template of a transformers tokenizer that has one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format in which the model writes calls of tools."""
        return tool_format(self._with_tools)

    @cached_property
    def thought_marks(self) -> ThoughtMarks | None:
        """The marks of the model's thoughts; None if it does not think."""
        return thought_marks(self._text)

    @cached_property
    def markers(self) -> frozenset[str]:
        """Texts that mean something in an answer, even if they are special tokens."""
        marks = self.thought_marks
        return self.tool_format.markers | ({marks.opening, marks.closing} if marks is not None else set())

    @cached_property
    def tools_name(self) -> str | None:
        """Name of the variable from which the template takes tools; None if it takes none."""
        names = _variables(self._with_tools)
        return next((name for name in ("tools", "xml_tools") if name in names), None)

    def render(self, messages: Sequence[Any]) -> str:
        """Return the text of a chat, up to where the answer begins.

        Raises `InvalidRequest` if the template refuses the messages, has no tools, or does not think.
        """
        variables = self._variables_of(messages) if isinstance(messages, Chat) else {}
        template = self._with_tools if "tools" in variables else self._text
        try:
            known = _with_known_roles(messages, template)
            if _ADDED_ARGUMENTS.search(template):
                known = [_with_arguments_as_text(message) for message in known]
            text: str = self._tokenizer.apply_chat_template(
                known, add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # a template is a program that came with the model and may raise anything
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return text

    @property
    def _text(self) -> str:
        return self._chosen(None)

    @property
    def _with_tools(self) -> str:
        return self._chosen([])

    def _chosen(self, tools: list[Any] | None) -> str:
        """Return the template; if there are several, the one for chats with or without `tools`."""
        try:
            text: str = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:
            return ""  # there are several, but none for this case: rendering raises the error
        return text

    def _variables_of(self, chat: Chat) -> dict[str, Any]:
        """Return the variables of the template that the chat sets."""
        variables: dict[str, Any] = {}
        if chat.tools:
            if self.tools_name is None:
                raise InvalidRequest(
                    "the model's chat template takes no tools: leave tools out, or serve a model "
                    "whose template has them, such as Qwen3, Llama 3, Mistral or SmolLM3",
                    param="tools",
                    code="unsupported_parameter",
                )
            variables[self.tools_name] = list(chat.tools)
        if chat.options or chat.effort is not None:
            names = _variables(self._text)
            variables |= self._switches(chat.options, names)
            if chat.effort is not None:
                variables |= self._effort(chat.effort, names) | variables
        return variables

    def _switches(self, options: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
        for name, value in options.items():
            # A template without a switch for thinking does not think anyway.
            if name not in names and value is not False:
                raise self._unknown(f"chat_template_kwargs.{name}")
        return {name: value for name, value in options.items() if name in names}

    def _effort(self, effort: str, names: frozenset[str]) -> dict[str, Any]:
        found: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in names}
        if "reasoning_effort" in names:
            found["reasoning_effort"] = effort
        if not found and effort != "none":
            raise self._unknown("reasoning_effort")
        return found

    def _unknown(self, name: str) -> InvalidRequest:
        return InvalidRequest(
            f"{name} has no effect on the model's chat template: leave it out",
            param=name,
            code="unsupported_parameter",
        )


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with the arguments of its calls as JSON."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a template expects from outside."""
    from jinja2 import Environment, TemplateError, meta

    # The tags that mark the model's own text in templates for training are an extension by transformers.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
        return frozenset(meta.find_undeclared_variables(parsed))
    except TemplateError:
        return frozenset(re.findall(r"[A-Za-z_]\w*", template))


def _with_known_roles(messages: Sequence[Any], template: str) -> list[dict[str, Any]]:
    """Return `messages` with `developer`, the newer name of `system`, as `system` if the template does not name it."""
    known = "'developer'" in template or '"developer"' in template
    return [
        dict(message) if known or message["role"] != "developer" else {**message, "role": "system"}
        for message in messages
    ]
