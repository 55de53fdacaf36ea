"""Reader of calls that each stand between markers of their own, as DeepSeek's models write them."""

from __future__ import annotations

import re

from batchwright.wire.tool_calls.formats import CallMarks
from batchwright.wire.tool_calls.json_values import SPACE, JsonValueEnd, State
from batchwright.wire.tool_calls.sections import CallSink, Tools

_FENCE = "```"
_LONGEST_HEAD = 256


class MarkedSection:
    """Reader of calls as a name, a marker and an object, perhaps in a fence, between two markers."""

    def __init__(self, marks: CallMarks, tools: Tools, sink: CallSink) -> None:
        self.state = State.READING
        self.rest = ""
        self._marks = marks
        self._tools = tools
        self._sink = sink
        middle = re.escape(marks.middle)
        self._head = re.compile(rf"\s*(?:{marks.kind}{middle})?([^\s<{{]+)\s*(?:{middle})?\s*(?:{_FENCE}json)?\s*\{{")
        self._calls = 0
        self._held = ""
        """What was read of a marker or of a name."""
        self._lost = ""
        """Marker that has begun a call, until its name is known."""
        self._value: JsonValueEnd | None = None

    def read(self, text: str, at: int) -> int:
        while at < len(text) and self.state is State.READING:
            if self._value is not None:
                end = self._value.read(text, at)
                self._sink.arguments(text[at:end])
                if self._value.state is not State.READING:
                    self._value = None
                at = end
            elif self._lost:
                at = self._read_head(text[at], at)
            else:
                at = self._read_marker(text[at], at)
        return at

    def unfinished(self) -> str:
        return self._lost + self._held if self._calls else ""

    def _read_marker(self, character: str, at: int) -> int:
        if not self._held and character in SPACE:
            return at + 1
        self._held += character
        marks = self._marks
        # Anything but the beginning of a call may only follow a call.
        able = (marks.begin, marks.end, marks.section_end, _FENCE) if self._calls else (marks.begin,)
        if self._held not in able:
            if not any(marker.startswith(self._held) for marker in able):
                self._end()
            return at + 1
        if self._held == marks.begin:
            self._lost = self._held
        elif self._held == marks.section_end:
            self.state = State.DONE
        self._held = ""
        return at + 1

    def _read_head(self, character: str, at: int) -> int:
        self._held += character
        if character == "{":
            found = self._head.fullmatch(self._held)
            if found is not None and found[1] in self._tools:
                self._held = self._lost = ""
                self._calls += 1
                self._value = JsonValueEnd()
                self._sink.begin(found[1])
                return at
            self._end()
        elif len(self._held) > _LONGEST_HEAD:
            self._end()
        return at + 1

    def _end(self) -> None:
        self.state = State.DONE if self._calls else State.REFUSED
        self.rest, self._lost, self._held = self._lost + self._held, "", ""
