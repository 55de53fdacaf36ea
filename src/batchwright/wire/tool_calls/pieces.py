"""Pieces of an answer: what new text of a model turned out to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model wrote while it thought about its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call, whose arguments follow."""

    call: int
    """Position of the call among those of the answer."""
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next characters of the arguments of a call, which together are a JSON object if the model wrote one."""

    call: int
    text: str


Piece: TypeAlias = Content | Thought | CallBegin | Arguments


@dataclass(slots=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str
    """Text of a JSON object; cut off where the answer was."""


@dataclass(slots=True)
class Answer:
    """A whole answer, in its parts."""

    content: str = ""
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Answer:
        """Return the answer that consists of these pieces."""
        answer = cls()
        for piece in pieces:
            match piece:
                case Content():
                    answer.content += piece.text
                case Thought():
                    answer.thought += piece.text
                case CallBegin():
                    answer.calls.append(ToolCall(piece.name, ""))
                case Arguments():
                    answer.calls[piece.call].arguments += piece.text
        return answer
