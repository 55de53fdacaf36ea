"""Formats of tool calls and of thoughts, and which of them a model's chat template uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

FormatName: TypeAlias = Literal[
    "hermes", "qwen_coder", "mistral", "llama", "pythonic", "granite", "deepseek", "deepseek_v31", "json",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallMarks:
    """Markers around each of several calls, and between its name and its arguments."""

    begin: str
    middle: str
    end: str
    section_end: str
    """Marker after the last call."""
    kind: str = ""
    """Text before the name, followed by `middle`. The arguments are then in a fence."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls of tools."""

    name: FormatName
    openings: tuple[str, ...] = ()
    """Markers, any of which begins calls anywhere in an answer."""
    closing: str = ""
    """Marker that may end what an opening began."""
    at_start: bool = False
    """Whether an answer may begin with calls without a marker."""
    between: tuple[str, ...] = ()
    """Markers within a call."""
    short_ids: bool = False
    """Whether the template takes only ids of nine letters and digits."""
    marks: CallMarks | None = None
    """Markers around each call; None if there are none."""

    @property
    def markers(self) -> frozenset[str]:
        """All markers of the format, which may be special tokens of the model."""
        marks = self.marks
        around = () if marks is None else (marks.begin, marks.middle, marks.end, marks.section_end)
        return frozenset(each for each in (*self.openings, self.closing, *self.between, *around) if each)


_DEEPSEEK = ("<｜tool▁calls▁begin｜>",)
_MARKS = CallMarks("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("qwen_coder", ("<tool_call>", "<function="), "</tool_call>"),
    ToolFormat("hermes", ("<tool_call>",), "</tool_call>"),
    ToolFormat("mistral", ("[TOOL_CALLS]",), between=("[ARGS]", "[CALL_ID]"), short_ids=True),
    ToolFormat("llama", ("<|python_tag|>",), at_start=True),
    ToolFormat("pythonic", ("<|python_start|>",), "<|python_end|>", at_start=True),
    ToolFormat("granite", ("<|tool_call|>", "<tool_call>")),
    ToolFormat("deepseek", _DEEPSEEK, marks=replace(_MARKS, kind="function")),
    ToolFormat("deepseek_v31", _DEEPSEEK, marks=_MARKS),
    ToolFormat("json", at_start=True),
)
_SIGNS: tuple[tuple[FormatName, tuple[str, ...]], ...] = (
    ("pythonic", ("[func_name1(",)),
    ("granite", ("<|tool_call|>",)),
    ("deepseek", (*_DEEPSEEK, "```json")),
    ("deepseek_v31", _DEEPSEEK),
    ("qwen_coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama", ("<|python_tag|>",)),
    ("llama", ('"parameters": dictionary of argument name',)),
)
"""Texts by which a template is recognized, in this order: it shows them to the model, or writes earlier calls with
them."""


def tool_format(template: str) -> ToolFormat:
    """Return the format that the text of a chat template uses; plain JSON if it has no sign of any."""
    named = next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), "json")
    return next(each for each in FORMATS if each.name == named)


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Texts between which a model thinks, at the beginning of its answers."""

    opening: str
    closing: str


_THOUGHTS = (ThoughtMarks("<think>", "</think>"), ThoughtMarks("[THINK]", "[/THINK]"))


def thought_marks(template: str) -> ThoughtMarks | None:
    """Return the marks of thoughts that the text of a chat template names; None if it names none."""
    return next((marks for marks in _THOUGHTS if marks.closing in template), None)


def closes_thought(prompt_end: str, marks: ThoughtMarks) -> bool:
    """Return whether the end of a prompt has ended the thought, so that the answer has none."""
    return prompt_end.rstrip().endswith(marks.closing)


def opens_thought(prompt_end: str, marks: ThoughtMarks) -> bool:
    """Return whether the end of a prompt has begun the thought that the answer continues."""
    return prompt_end.rstrip().endswith(marks.opening)
