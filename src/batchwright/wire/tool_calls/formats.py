"""Formats of tool calls and of thoughts, and which of them a model's chat template speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

FormatName: TypeAlias = Literal["hermes", "qwen_coder", "mistral", "llama", "json"]


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

    @property
    def markers(self) -> frozenset[str]:
        """All markers of the format, which may be special tokens of the model."""
        return frozenset(each for each in (*self.openings, self.closing, *self.between) if each)


FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("qwen_coder", ("<tool_call>", "<function="), "</tool_call>"),
    ToolFormat("hermes", ("<tool_call>",), "</tool_call>"),
    ToolFormat("mistral", ("[TOOL_CALLS]",), between=("[ARGS]", "[CALL_ID]"), short_ids=True),
    ToolFormat("llama", ("<|python_tag|>",), at_start=True),
    ToolFormat("json", at_start=True),
)
_SIGNS: tuple[tuple[str, FormatName], ...] = (
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama"),
    ('"parameters": dictionary of argument name', "llama"),
)
"""Texts by which a template is recognized, in this order: it shows them to the model, or writes earlier calls so."""


def tool_format(template: str) -> ToolFormat:
    """Return the format that the text of a chat template speaks; if it has no sign of any, plain JSON."""
    named = next((name for sign, name in _SIGNS if sign in template), "json")
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
    """Return whether the end of a prompt has ended the thought of the answer, so that it has none."""
    return prompt_end.rstrip().endswith(marks.closing)


def opens_thought(prompt_end: str, marks: ThoughtMarks) -> bool:
    """Return whether the end of a prompt has begun the thought with which the answer goes on."""
    return prompt_end.rstrip().endswith(marks.opening)
