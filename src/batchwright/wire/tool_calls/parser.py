"""Parsing of generated text, as it comes, into content, thoughts and calls of tools.

The result does not depend on how the text is cut into pieces, and text that never becomes a call is content. White
space beside calls and thoughts belongs to their format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchwright.stop_strings import StopAutomaton
from batchwright.wire.tool_calls.formats import ThoughtMarks, ToolFormat
from batchwright.wire.tool_calls.json_values import SPACE, State
from batchwright.wire.tool_calls.marked_calls import MarkedSection
from batchwright.wire.tool_calls.pieces import Answer, Arguments, CallBegin, Content, Piece, Thought
from batchwright.wire.tool_calls.pythonic import PythonicSection
from batchwright.wire.tool_calls.sections import JsonSection, NamedSection, Section, TaggedSection, Tools


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What answers to a request may consist of, besides content."""

    tool_format: ToolFormat | None = None
    """Format of calls. None: no tool may be called, and all text is content."""
    tools: Tools | None = None
    parallel: bool = True
    """Whether an answer may have several calls; if not, all but the first are left out."""
    is_json: bool = False
    """Whether the answer was requested as JSON, of which only a named tool with its arguments is a call."""
    thought: ThoughtMarks | None = None
    """Marks of thoughts. None: the model does not think."""
    in_thought: bool = False
    """Whether answers begin within a thought, which the prompt has opened."""

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(self)

    def parse(self, text: str) -> Answer:
        """Return the parts of a whole answer."""
        parser = self.parser()
        return Answer.of([*parser.push(text), *parser.finish()])


class AnswerParser:
    """Parser of one answer."""

    def __init__(self, form: AnswerForm) -> None:
        self._thought = None if form.thought is None else _ThoughtParser(form.thought, is_open=form.in_thought)
        tools = form.tool_format if form.tools else None
        if tools is not None and form.is_json:
            # A marker within such an answer is part of one of its texts.
            tools = replace(tools, openings=(), closing="") if tools.at_start else None
        self._calls = None if tools is None else _CallParser(tools, form)

    def push(self, text: str) -> list[Piece]:
        """Return what the next characters of the answer turned out to be."""
        pieces: list[Piece] = []
        if self._thought is not None:
            thought, text = self._thought.push(text)
            pieces += [Thought(thought)] if thought else []
        return pieces + self._content(text)

    def finish(self) -> list[Piece]:
        """Return what was held back, once no more text comes."""
        pieces: list[Piece] = []
        if self._thought is not None:
            thought, text = self._thought.finish()
            pieces += [Thought(thought)] if thought else []
            pieces += self._content(text)
        return pieces + (self._calls.finish() if self._calls is not None else [])

    def _content(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else self._calls.push(text)


class _ThoughtParser:
    """Splits the thought with which an answer begins from the rest."""

    def __init__(self, marks: ThoughtMarks, *, is_open: bool) -> None:
        """`is_open`: whether the answer begins within the thought."""
        self._marks = marks
        self._held = ""
        self._is_open = is_open
        self._is_over = False
        self._says_opening = False
        """Whether the opening mark may still come; some models write it although the prompt has."""
        self._begin_thought(is_open)

    def _begin_thought(self, is_open: bool) -> None:
        self._says_opening = is_open
        self._at_edge = True
        """Whether nothing but white space has come since the last mark."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the new text of the thought, and that of the rest."""
        if self._is_over:
            return "", self._after(text)
        self._held += text
        if not self._is_open or self._says_opening:
            begin = self._held.lstrip()
            if self._marks.opening.startswith(begin) and begin != self._marks.opening:
                return "", ""  # it may become the opening mark
            if begin.startswith(self._marks.opening):
                self._held, self._is_open = begin[len(self._marks.opening) :], True
            elif not self._is_open:
                self._is_over, self._at_edge = True, False
                held, self._held = self._held, ""
                return "", held
            self._says_opening = False
        return self._read_thought()

    def finish(self) -> tuple[str, str]:
        """Return what was held back of the thought, and of the rest."""
        held, self._held = self._held, ""
        if self._is_over or not self._is_open:
            return "", held
        return ("", "") if not held.strip() else (held.lstrip() if self._at_edge else held, "")

    def _read_thought(self) -> tuple[str, str]:
        if self._at_edge:
            self._held = self._held.lstrip()
            self._at_edge = not self._held
        closing = self._marks.closing
        end = self._held.find(closing)
        if end >= 0:
            thought, rest = self._held[:end].rstrip(), self._held[end + len(closing) :]
            self._held, self._is_over, self._at_edge = "", True, True
            return thought, self._after(rest)
        keep = next((n for n in range(min(len(closing) - 1, len(self._held)), 0, -1)
                     if self._held.endswith(closing[:n])), 0)  # fmt: skip
        certain = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(certain) :]
        return certain, ""

    def _after(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text


class _CallParser:
    """Finds the calls in the text of an answer."""

    def __init__(self, tool_format: ToolFormat, form: AnswerForm) -> None:
        self._form = tool_format
        self._tools: Tools = form.tools or {}
        self._parallel = form.parallel
        self._is_json = form.is_json
        self._automaton = StopAutomaton(tool_format.openings)
        self._node = 0
        self._held = ""
        """Text that may be the beginning of a marker."""
        self._space = ""
        """White space that is content unless a call follows."""
        self._at_start = tool_format.at_start
        self._after_call = False
        self._section: Section | None = None
        self._raw = ""
        """Text of the section, as long as it has no call."""
        self._section_calls = 0
        self._closing: str | None = None
        """What was read of the closing marker; None: none is being read."""
        self._calls = 0
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that the next characters make certain."""
        at = 0
        while at < len(text):
            if self._section is not None:
                at = self._read_section(self._section, text, at)
            elif self._closing is not None:
                at = self._read_closing(self._closing, text[at], at)
            elif self._at_start:
                at = self._read_start(text[at], at)
            else:
                at = self._read_content(text, at)
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the pieces in what was held back."""
        section, self._section = self._section, None
        if section is not None and not self._section_calls:
            self._content(self._raw)
        elif section is not None:
            self._after_call = True
            self._content(section.unfinished())
        self._content((self._closing or "") + self._held)
        if self._space:
            self._pieces.append(Content(self._space))
        return self._taken()

    def begin(self, name: str) -> None:
        self._raw = self._space = ""
        self._section_calls += 1
        self._calls += 1
        if self._parallel or self._calls == 1:
            self._pieces.append(CallBegin(self._calls - 1, name))

    def arguments(self, text: str) -> None:
        if text and (self._parallel or self._calls == 1):
            self._pieces.append(Arguments(self._calls - 1, text))

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_start(self, character: str, at: int) -> int:
        if character in SPACE:
            self._space += character
            return at + 1
        self._at_start = False
        if character in "{[":
            self._open("", character)
        return at

    def _read_content(self, text: str, at: int) -> int:
        self._node, end, length = self._automaton.read(self._node, text[at:], armed=True)
        self._held += text[at : at + end]
        keep = length or self._automaton.depths[self._node]
        cut = len(self._held) - keep
        certain, self._held = self._held[:cut], self._held[cut:]
        self._content(certain)
        if length:
            marker, self._held, self._node = self._held, "", 0
            self._open(marker)
        return at + end

    def _open(self, marker: str, first: str = "") -> None:
        """Begin a section after `marker`, or without one at the character `first`."""
        self._raw, self._section_calls = marker, 0
        self._section = self._section_of(marker, first)

    def _section_of(self, marker: str, first: str) -> Section:
        if self._form.marks is not None:
            return MarkedSection(self._form.marks, self._tools, self)
        if self._form.name == "mistral":
            return NamedSection(self._tools, self)
        if self._form.name == "qwen_coder":
            return TaggedSection(self._tools, self, begun=marker == self._form.openings[1])
        if self._form.name == "pythonic" and first != "{":
            return PythonicSection(self._tools, self)
        return JsonSection(self._tools, self, need_arguments=self._is_json)

    def _read_section(self, section: Section, text: str, at: int) -> int:
        end = section.read(text, at)
        if not self._section_calls:
            self._raw += text[at:end]
        if section.state is not State.READING:
            self._section = None
            if self._section_calls:
                self._after_call = True
                self._closing = "" if self._form.closing and not section.rest else None
                self._content(section.rest)
            else:
                raw, self._raw = self._raw, ""
                self._content(raw)
        return end

    def _read_closing(self, read: str, character: str, at: int) -> int:
        if not read and character in SPACE:
            return at + 1
        if not self._form.closing.startswith(read + character):
            self._closing = None
            self._content(read)
            return at
        self._closing = None if read + character == self._form.closing else read + character
        return at + 1

    def _content(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._pieces.append(Content(certain))
