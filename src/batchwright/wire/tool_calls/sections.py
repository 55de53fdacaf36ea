"""Readers of the sections of an answer in which tools are called, one for each way of writing calls.

A section begins after the opening marker of its format, or at the beginning of the answer. Its reader passes calls on
to a `CallSink` as soon as their names are certain, and ends before the first character that belongs to no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from batchwright.wire.tool_calls.json_values import SPACE, JsonCall, JsonValueEnd, State

Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments of tools, by the names of the tools."""


class CallSink(Protocol):
    """The receiver of the calls."""

    def begin(self, name: str) -> None:
        """Take the beginning of the next call."""

    def arguments(self, text: str) -> None:
        """Take the next characters of the arguments of that call."""


class Section(Protocol):
    """A reader of one section."""

    state: State
    """Refused if there was no call at all."""
    rest: str
    """Text that was read after the last call and belongs to none, once the section is done."""

    def read(self, text: str, at: int) -> int:
        """Read `text` from `at`, and return where reading ended: at the end of the text or of the section."""

    def unfinished(self) -> str:
        """Return the text that was read after the last call that has begun, once no more text comes."""


class JsonSection:
    """Reader of calls as JSON objects: one, several separated by commas, semicolons or white space, or a list."""

    def __init__(self, tools: Tools, sink: CallSink, *, need_arguments: bool = False) -> None:
        """`need_arguments`: whether an object without arguments is not a call."""
        self.state = State.READING
        self.rest = ""
        self._tools = tools
        self._sink = sink
        self._need_arguments = need_arguments
        self._call: JsonCall | None = None
        self._between = ""
        """Text since the last call, which is dropped if another call follows, and kept otherwise."""
        self._has_begun = False
        self._calls = 0
        self._in_list = False

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.state is State.READING:
            at = self._read_between(text[at], at) if self._call is None else self._read_call(self._call, text, at)
        return at

    def unfinished(self) -> str:
        return self._between if self._calls else ""

    def _read_between(self, character: str, at: int) -> int:
        if character == "{":
            self._call = JsonCall(self._tools, needs_arguments=self._need_arguments)
            self._has_begun = False
        elif character == "[" and not self._calls and not self._in_list:
            self._in_list = True
        elif character == "]" and self._calls and self._in_list and not self._between:
            self.state = State.DONE
            return at + 1
        elif not (character in SPACE or (character in ",;" and self._calls and not self._between)):
            self._end()
            return at
        if character == "{" or self._between or character in ",;":
            self._between += character
        return at + 1

    def _read_call(self, call: JsonCall, text: str, at: int) -> int:
        end, arguments = call.read(text, at)
        if call.name is None:
            self._between += text[at:end]
        else:
            if not self._has_begun:
                self._has_begun, self._between = True, ""
                self._calls += 1
                self._sink.begin(call.name)
            if arguments:
                self._sink.arguments(arguments)
        if call.state is State.REFUSED:
            self._end()
        elif call.state is State.DONE:
            self._call = None
        return end

    def _end(self) -> None:
        self.state, self.rest = (State.DONE if self._calls else State.REFUSED), self._between


class NamedSection:
    """Reader of one call as a name and an object, with `[ARGS]` between them; Mistral's older form is a list."""

    _HEAD = re.compile(r"\s*([^\s\[\]{]+)(\[CALL_ID\][^\s\[\]{]*)?(\[ARGS\])?\s*\{")
    _LONGEST_HEAD = 256

    def __init__(self, tools: Tools, sink: CallSink) -> None:
        self.state = State.READING
        self.rest = ""
        self._tools = tools
        self._sink = sink
        self._head = ""
        self._list: JsonSection | None = None
        self._value: JsonValueEnd | None = None

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.state is State.READING:
            if self._list is not None:
                at = self._list.read(text, at)
                self.state, self.rest = self._list.state, self._list.rest
            elif self._value is not None:
                end = self._value.read(text, at)
                self._sink.arguments(text[at:end])
                self.state, at = self._value.state, end
            else:
                at = self._read_head(text[at], at)
        return at

    def unfinished(self) -> str:
        return self._list.unfinished() if self._list is not None else ""

    def _read_head(self, character: str, at: int) -> int:
        if character in "[{" and not self._head.strip():
            self._list = JsonSection(self._tools, self._sink)
            return at
        self._head += character
        if character == "{":
            found = self._HEAD.fullmatch(self._head)
            if found is None or found[1] not in self._tools:
                self.state = State.REFUSED
            else:
                self._value = JsonValueEnd()
                self._sink.begin(found[1])
                return at
        elif len(self._head) > self._LONGEST_HEAD:
            self.state = State.REFUSED
        return at + 1


class TaggedSection:
    """Reader of one call as `<function=name>` with a `<parameter=key>` for each argument, as Qwen3-Coder writes them.

    Values are plain text: the schema of a parameter says whether it is a text or JSON.
    """

    _FUNCTION, _FUNCTION_END = "<function=", "</function>"
    _PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
    _LONGEST_NAME = 256

    def __init__(self, tools: Tools, sink: CallSink, *, begun: bool) -> None:
        """`begun`: whether `<function=` was the opening marker."""
        self.state = State.READING
        self.rest = ""
        self._tools = tools
        self._sink = sink
        self._buffer = self._FUNCTION if begun else ""
        self._properties: Mapping[str, Any] | None = None
        """Schemas of the arguments of the call, once it has begun."""
        self._key: str | None = None
        """Name of the argument whose value is being read."""
        self._keys: set[str] = set()

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.state is State.READING:
            at = self._read_tag(text[at], at) if self._key is None else self._read_value(self._key, text, at)
        return at

    def unfinished(self) -> str:
        return ""

    def _read_tag(self, character: str, at: int) -> int:
        if not self._buffer and character in SPACE:
            return at + 1
        self._buffer += character
        tags = (self._FUNCTION,) if self._properties is None else (self._PARAMETER, self._FUNCTION_END)
        begun = [tag for tag in tags if tag.startswith(self._buffer) or self._buffer.startswith(tag)]
        if not begun or len(self._buffer) > self._LONGEST_NAME:
            self._end(self._buffer)
        elif self._buffer == self._FUNCTION_END:
            self._end("")
        elif character == ">":
            name = self._buffer[len(begun[0]) : -1]
            self._buffer = ""
            if self._properties is None:
                self._begin(name)
            else:
                self._key = name
        return at + 1

    def _begin(self, name: str) -> None:
        if name not in self._tools:
            self.state = State.REFUSED
            return
        properties = self._tools[name].get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._sink.begin(name)
        self._sink.arguments("{")

    def _read_value(self, key: str, text: str, at: int) -> int:
        known = len(self._buffer)
        self._buffer += text[at:]
        end = self._buffer.find(self._PARAMETER_END, max(0, known - len(self._PARAMETER_END)))
        if end < 0:
            return len(text)
        value, self._buffer, self._key = self._buffer[:end], "", None
        if key not in self._keys and self._properties is not None:
            comma = ", " if self._keys else ""
            self._keys.add(key)
            argument = _as_json(value.removeprefix("\n").removesuffix("\n"), self._properties.get(key))
            self._sink.arguments(f"{comma}{json.dumps(key, ensure_ascii=False)}: {argument}")
        return at + end + len(self._PARAMETER_END) - known

    def _end(self, rest: str) -> None:
        if self._properties is None:
            self.state = State.REFUSED
        else:
            self.state, self.rest = State.DONE, rest
            self._sink.arguments("}")


def _as_json(value: str, schema: object) -> str:
    """Return the JSON of an argument that was written as plain text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            pass
        else:
            return value.strip()
    return json.dumps(value, ensure_ascii=False)
