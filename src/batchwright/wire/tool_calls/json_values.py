"""Reading of JSON values from text that arrives in pieces: where a value ends, and what an object says as a call."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

SPACE = " \t\r\n"
_QUIET = re.compile(r'[^"{}\[\]]*')
"""Text of an object or array, outside of strings, that changes nothing about where it ends."""
_IN_STRING = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")


class State(Enum):
    """How far a reader has come."""

    READING = auto()
    DONE = auto()
    REFUSED = auto()
    """What was read is not what the reader looks for."""


class JsonValueEnd:
    """Finds the end of one JSON value, without checking what is within it."""

    def __init__(self) -> None:
        self.state = State.READING
        self._depth = 0
        self._in_string = False
        self._escape = False
        self._scalar = False

    def read(self, text: str, at: int) -> int:
        """Read `text` from `at`, and return where reading ended: at the end of the text, or after the value.

        A number or a word ends before the first character that cannot belong to it; where no value can begin, nothing
        is read and the value is refused.
        """
        while at < len(text) and self.state is State.READING:
            if self._in_string:
                at = self._read_string(text, at)
            elif self._scalar:
                at = self._end(text, at, _SCALAR)
                if at < len(text):
                    self.state = State.DONE
            elif self._depth:
                at = self._end(text, at, _QUIET)
                if at < len(text):
                    at = self._open_or_close(text[at], at)
            else:
                at = self._begin(text[at], at)
        return at

    def _begin(self, character: str, at: int) -> int:
        if character in '"{[':
            return self._open_or_close(character, at)
        if not _SCALAR.fullmatch(character):
            self.state = State.REFUSED
            return at
        self._scalar = True
        return at + 1

    def _open_or_close(self, character: str, at: int) -> int:
        if character == '"':
            self._in_string = True
        else:
            self._depth += 1 if character in "{[" else -1
            if not self._depth:
                self.state = State.DONE
        return at + 1

    def _read_string(self, text: str, at: int) -> int:
        if self._escape:
            self._escape = False
            return at + 1
        at = self._end(text, at, _IN_STRING)
        if at < len(text):
            self._escape = text[at] == "\\"
            if text[at] == '"':
                self._in_string = False
                if not self._depth:
                    self.state = State.DONE
            at += 1
        return at

    @staticmethod
    def _end(text: str, at: int, quiet: re.Pattern[str]) -> int:
        found = quiet.match(text, at)
        return at if found is None else found.end()


class _Part(Enum):
    """What a reader of an object expects next."""

    KEY_OR_END = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA_OR_END = auto()


_NAME = "name"
_ARGUMENTS = frozenset({"arguments", "parameters"})


class JsonCall:
    """Reader of one call as a JSON object of a `name` and `arguments` (or `parameters`), in any order.

    Once the name and the beginning of the arguments are known, `name` is set and the text of the arguments is passed on
    as it comes. An object without the name of a tool in `names`, or with arguments that are not an object, is refused.
    """

    def __init__(self, names: Collection[str], *, needs_arguments: bool = False) -> None:
        """Begin after the opening brace. `needs_arguments`: whether an object without arguments is not a call."""
        self.state = State.READING
        self.name: str | None = None
        """Name of the tool, once it is certain that this is a call."""
        self._names = names
        self._needs_arguments = needs_arguments
        self._part = _Part.KEY_OR_END
        self._value = JsonValueEnd()
        self._raw = ""
        """Text of the key or value that is being read, as far as it is kept."""
        self._key = ""
        self._complete: dict[str, str] = {}
        """Name and arguments, once they are complete."""
        self._streams = False
        self._has_arguments = False

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read `text` from `at`, and return where reading ended and the new text of the arguments.

        Reading ends at the end of the text, after the object, or before the character for which it is refused. An
        object that is already known to be a call is no longer refused: it ends there.
        """
        arguments: list[str] = []
        while at < len(text) and self.state is State.READING:
            if self._part in (_Part.IN_KEY, _Part.IN_VALUE):
                at = self._read_value(text, at, arguments)
            elif text[at] in SPACE:
                at += 1
            else:
                at = self._read_mark(text[at], at, arguments)
        return at, "".join(arguments)

    def _read_mark(self, character: str, at: int, arguments: list[str]) -> int:
        """Read one character between keys and values."""
        match self._part, character:
            case ((_Part.KEY_OR_END | _Part.KEY), '"'):
                self._begin_value(_Part.IN_KEY)
                return at
            case ((_Part.KEY_OR_END | _Part.COMMA_OR_END), "}"):
                self._finish(arguments)
                return at + 1 if self.state is State.DONE else at
            case _Part.COLON, ":":
                self._part = _Part.VALUE
            case _Part.VALUE, _:
                self._begin_value(_Part.IN_VALUE)
                # The name is known, and this is the beginning of an object of arguments.
                if character == "{" and self._key in _ARGUMENTS and _NAME in self._complete and not self._has_arguments:
                    self.name, self._streams, self._has_arguments = self._complete[_NAME], True, True
                return at
            case _Part.COMMA_OR_END, ",":
                self._part = _Part.KEY
            case _:
                self._refuse()
                return at
        return at + 1

    def _begin_value(self, part: _Part) -> None:
        self._part, self._value, self._raw = part, JsonValueEnd(), ""

    def _read_value(self, text: str, at: int, arguments: list[str]) -> int:
        end = self._value.read(text, at)
        if self._streams:
            arguments.append(text[at:end])
        else:
            self._raw += text[at:end]
        if self._value.state is State.REFUSED:
            self._refuse()
        elif self._value.state is State.DONE:
            is_key, streamed = self._part is _Part.IN_KEY, self._streams
            self._part, self._streams = (_Part.COLON if is_key else _Part.COMMA_OR_END), False
            if not streamed and not (self._keep_key() if is_key else self._keep_value()):
                self._refuse()
        return end

    def _keep_key(self) -> bool:
        """Take the key that was read, and return whether it is one."""
        key = _decoded(self._raw)
        self._key = key if isinstance(key, str) else ""
        return isinstance(key, str)

    def _keep_value(self) -> bool:
        """Take the value that was read, and return whether the object may still be a call."""
        if self._key == _NAME and _NAME not in self._complete:
            name = _decoded(self._raw)
            if not isinstance(name, str) or name not in self._names:
                return False
            self._complete[_NAME] = name
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            # Some models write the object as a string.
            arguments = _decoded(self._raw) if self._raw.startswith('"') else self._raw
            if arguments == "null":
                return True
            if not isinstance(arguments, str) or not arguments.startswith("{"):
                return False
            self._complete["arguments"] = arguments
        return True

    def _finish(self, arguments: list[str]) -> None:
        if self.name is None:
            if _NAME not in self._complete or (self._needs_arguments and "arguments" not in self._complete):
                self.state = State.REFUSED
                return
            self.name = self._complete[_NAME]
            arguments.append(self._complete.get("arguments", "{}"))
        self.state = State.DONE

    def _refuse(self) -> None:
        self.state = State.REFUSED if self.name is None else State.DONE


def _decoded(raw: str) -> object:
    try:
        return json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return None
