"""Reader of calls that are written as in Python: `[weather(city="Paris", days=2), now()]`, as Llama 4 writes them."""

from __future__ import annotations

import json
import re

from batchwright.wire.tool_calls.json_values import SPACE, State
from batchwright.wire.tool_calls.sections import CallSink, Tools

_LONGEST_NAME = 256
_FUNCTION = re.compile(r"\s*([\w.-]+)\s*\(")
_ARGUMENT = re.compile(r"\s*(\w+)\s*=")
_MARKS = re.compile(r"""["'()\[\]{},]""")
"""Characters, outside of texts, that determine where a value ends."""
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|\b(True|False|None)\b""", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(0010[0-9a-fA-F]{4}|000[0-9a-fA-F]{5})|(.))", re.DOTALL
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}


class PythonicSection:
    """Reader of a list of calls with arguments by name.

    A call has begun once its first argument, or its end, has been read. Arguments are passed on one by one.
    """

    def __init__(self, tools: Tools, sink: CallSink) -> None:
        self.state = State.READING
        self.rest = ""
        self._tools = tools
        self._sink = sink
        self._between = ""
        """Text since the last call, which is dropped if another call follows, and kept otherwise."""
        self._in_list = False
        self._head = ""
        """What was read of a function or of the name of an argument."""
        self._name: str | None = None
        """Name of the function whose arguments are being read."""
        self._has_begun = False
        self._keys: set[str] = set()
        self._value: _Value | None = None
        self._key = ""
        self._calls = 0
        self._after_call = False

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.state is State.READING:
            if self._value is not None:
                at = self._read_value(self._value, text, at)
                continue
            if not self._has_begun:
                self._between += text[at]
            if self._name is not None:
                self._read_argument(self._name, text[at])
            else:
                self._read_function(text[at])
            at += 1
        return at

    def unfinished(self) -> str:
        return self._between if self._calls else ""

    def _read_function(self, character: str) -> None:
        if not self._in_list:
            self._in_list = character == "["
            if not (self._in_list or character in SPACE):
                self._end()
        elif self._after_call and (character in SPACE or character == ","):
            self._after_call = character != ","
        elif self._after_call or (character == "]" and not self._head.strip()):
            # What ends the list belongs to it.
            self._between = "" if character == "]" and self._calls else self._between
            self._end()
        else:
            self._head += character
            if character == "(":
                found = _FUNCTION.fullmatch(self._head)
                self._head = ""
                if found is None or found[1] not in self._tools:
                    self._end()
                else:
                    self._name, self._has_begun, self._keys = found[1], False, set()
            elif len(self._head) > _LONGEST_NAME:
                self._end()

    def _read_argument(self, name: str, character: str) -> None:
        if character == ")" and not self._head.strip():
            self._begin(name)
            self._sink.arguments("}")
            self._name, self._head, self._after_call, self._has_begun = None, "", True, False
        elif character == "," and not self._head.strip() and self._has_begun:
            pass  # after an argument
        else:
            self._head += character
            if character == "=":
                found = _ARGUMENT.fullmatch(self._head)
                if found is None:
                    self._end()
                    return
                self._begin(name)
                self._key, self._head, self._value = found[1], "", _Value()
            elif len(self._head) > _LONGEST_NAME:
                self._end()

    def _begin(self, name: str) -> None:
        if not self._has_begun:
            self._has_begun, self._between = True, ""
            self._calls += 1
            self._sink.begin(name)
            self._sink.arguments("{")

    def _read_value(self, value: _Value, text: str, at: int) -> int:
        end = value.read(text, at)
        if value.is_over:
            if self._key not in self._keys:
                comma = ", " if self._keys else ""
                self._keys.add(self._key)
                self._sink.arguments(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: {as_json(value.text)}")
            self._value = None
        return end

    def _end(self) -> None:
        if self._has_begun:
            self._sink.arguments("}")
            self._between = self._head
        self.state, self.rest = (State.DONE if self._calls else State.REFUSED), self._between


class _Value:
    """Finds the end of a value: the comma or bracket that belongs to none of its parts, which is not read."""

    def __init__(self) -> None:
        self.is_over = False
        self._parts: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escape = False

    @property
    def text(self) -> str:
        """What was read."""
        return "".join(self._parts)

    def read(self, text: str, at: int) -> int:
        """Read `text` from `at`, and return where reading ended."""
        begin = at
        while at < len(text) and not self.is_over:
            if self._quote:
                at = self._read_text(text, at)
            elif (found := _MARKS.search(text, at)) is None:
                at = len(text)
            else:
                at = self._mark(found[0], found.start())
        self._parts.append(text[begin:at])
        return at

    def _mark(self, character: str, at: int) -> int:
        if not self._depth and character in ",)]}":
            self.is_over = True
            return at
        if character in "\"'":
            self._quote = character
        elif character != ",":
            self._depth += 1 if character in "([{" else -1
        return at + 1

    def _read_text(self, text: str, at: int) -> int:
        if self._escape:
            self._escape = False
        elif text[at] == "\\":
            self._escape = True
        elif text[at] == self._quote:
            self._quote = ""
        return at + 1


def as_json(value: str) -> str:
    """Return the JSON of a value that is written as in Python; anything else becomes a string."""
    value = value.strip()
    try:
        read = json.loads(_LITERAL.sub(_literal, value), parse_constant=_refuse)
        return _written(read)
    except (ValueError, RecursionError):
        return _written(value)


def _literal(found: re.Match[str]) -> str:
    if found[3]:
        return _CONSTANTS[found[3]]
    text = found[1] if found[1] is not None else found[2]
    return json.dumps(_ESCAPE.sub(_unescaped, text))


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return chr(int(code, 16)) if code else _ESCAPED.get(found[4], found[0])


def _written(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return json.dumps(value)
    return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)
