"""Prompt templates: a text with the columns of a table in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from batchwright.errors import InputError, InvalidRequest


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Text with `{column}` in it; `{{` and `}}` are braces."""

    parts: tuple[tuple[str, str | None], ...]
    """Pairs of literal text and the column that follows it (None at the end)."""

    @classmethod
    def parse(cls, text: str) -> PromptTemplate:
        """Parse a template. Raises `InputError` for one that is not well formed or names no column."""
        try:
            parsed = [*Formatter().parse(text)]
        except ValueError as error:
            raise InputError(
                f"prompt template {text!r}: {error}; write a column as {{column}} and a brace as {{{{ or }}}}"
            ) from error
        for _, column, spec, conversion in parsed:
            if column == "":
                raise InputError(f"prompt template {text!r}: {{}} names no column; write {{column}}")
            if spec or conversion:
                raise InputError(f"prompt template {text!r}: {{{column}…}} has a format; write only {{{column}}}")
        template = cls(tuple((literal, column) for literal, column, _, _ in parsed))
        if not template.columns:
            raise InputError(f"prompt template {text!r} names no column, so all prompts would be the same")
        return template

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def check(self, available: Sequence[str]) -> None:
        """Raise `InputError` naming the columns that are not in `available`."""
        missing = [column for column in self.columns if column not in available]
        if missing:
            raise InputError(
                f"prompt template: no column {', '.join(map(repr, missing))} in the input; "
                f"it has {', '.join(map(repr, available))}"
            )

    def render(self, row: Mapping[str, object]) -> str:
        """Return the prompt for one row. Raises `InvalidRequest` when a column that it reads has no value there."""
        pieces = []
        for literal, column in self.parts:
            pieces.append(literal)
            if column is not None:
                pieces.append(_text(column, row[column]))
        return "".join(pieces)


def _text(column: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise InvalidRequest(f"column {column!r} has no value in this row", param=column, code="missing_field")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"column {column!r} holds bytes that are not UTF-8", param=column, code="invalid_encoding"
            ) from error
    return str(value)
