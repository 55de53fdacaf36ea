"""Templates that make a prompt or the messages of a chat from one row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Protocol

import msgspec

from batchwright.errors import InputError, InvalidRequest, MissingExtra, shown


class TextTemplate(Protocol):
    """A template that makes a text from a row."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the template reads, each once."""

    def render(self, row: Mapping[str, object]) -> str:
        """The text for one row, in which a cell without a value is empty. Raises `InvalidRequest`."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """Text with columns of a table as `{column}`, and braces as `{{` and `}}`."""

    parts: tuple[tuple[str, str | None], ...]
    """Pairs of literal text and the column that follows it; None if no column follows."""

    @classmethod
    def parse(cls, text: str) -> PromptTemplate:
        """The template `text`. Raises `InputError` if it is not well formed."""
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
        return cls(tuple((literal, column) for literal, column, _, _ in parsed))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the template reads, each once."""
        return tuple(dict.fromkeys(column for _, column in self.parts if column is not None))

    def render(self, row: Mapping[str, object]) -> str:
        """The text for one row, in which a cell without a value is empty. Raises `InvalidRequest`."""
        return "".join(
            literal if column is None else literal + _text(column, row.get(column)) for literal, column in self.parts
        )


class MessagesTemplate:
    """A Jinja template whose text is a JSON list of messages. Columns of the table are its variables."""

    def __init__(self, text: str) -> None:
        """Raises `InputError` for a template that is not well formed, `MissingExtra` if jinja2 is not installed."""
        try:
            from jinja2 import StrictUndefined, TemplateSyntaxError, meta
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise MissingExtra("a messages template needs jinja2; install it: pip install jinja2") from error
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_empty_for_none)
        try:
            self.columns = tuple(sorted(meta.find_undeclared_variables(environment.parse(text))))
            self._template = environment.from_string(text)
        except TemplateSyntaxError as error:
            raise InputError(f"messages template, line {error.lineno}: {error.message}") from error

    def render(self, row: Mapping[str, object]) -> list[Any]:
        """The messages for one row. Raises `InvalidRequest` if the template does not give a JSON list."""
        from jinja2 import TemplateError

        try:
            text = self._template.render({name: row.get(name) for name in self.columns})
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the messages template fails for this row: {error}", code="invalid_template"
            ) from error
        try:
            messages = msgspec.json.decode(text)
        except ValueError as error:
            raise InvalidRequest(
                f"the messages template gives no JSON for this row ({error}): {shown(text)}; write values as "
                "{{ column | tojson }}",
                code="invalid_template",
            ) from error
        if not isinstance(messages, list):
            raise InvalidRequest(
                f"the messages template gives {shown(text)} for this row: it must be a JSON list of messages",
                code="invalid_template",
            )
        return messages


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of a job, each None if it is not given."""

    prompt: TextTemplate | None = None
    """Template of the prompt, or of the user message if there is a `system`."""
    system: TextTemplate | None = None
    """Template of the system message before it."""
    messages: MessagesTemplate | None = None
    """Template of all messages, in place of the others."""

    @classmethod
    def of(cls, prompt: str | None, system: str | None, messages: str | None) -> Templates:
        """The templates with these texts, at least one of which is given. Raises `InputError`."""
        if messages is not None and (prompt is not None or system is not None):
            raise InputError("a messages template makes the whole chat: leave the prompt and system templates out")
        parsed = cls(
            None if prompt is None else PromptTemplate.parse(prompt),
            None if system is None else PromptTemplate.parse(system),
            None if messages is None else MessagesTemplate(messages),
        )
        if (parsed.prompt is not None and not parsed.prompt.columns) or not parsed.columns:
            text = prompt if prompt is not None else system if system is not None else messages
            raise InputError(f"template {shown(text)} names no column, so all prompts would be the same")
        return parsed

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the templates read, each once."""
        given = (each for each in (self.prompt, self.system, self.messages) if each is not None)
        return tuple(dict.fromkeys(column for each in given for column in each.columns))

    def check(self, available: Sequence[str]) -> None:
        """Raise `InputError` if the templates read columns that are not in `available`."""
        missing = [column for column in self.columns if column not in available]
        if missing:
            raise InputError(
                f"template: no column {', '.join(map(repr, missing))} in the input; "
                f"it has {', '.join(map(repr, available))}"
            )

    def render(self, row: Mapping[str, object]) -> dict[str, Any]:
        """The fields of the request for one row: `prompt` or `messages`.

        An empty or null cell becomes empty text. Raises `InvalidRequest` if all cells that the templates read are
        empty.
        """
        if all(row.get(column) in (None, "", b"") for column in self.columns):
            columns = ", ".join(map(repr, self.columns))
            raise InvalidRequest(
                f"the row has nothing in column {columns}", param=self.columns[0], code="missing_field"
            )
        if self.messages is not None:
            return {"messages": self.messages.render(row)}
        prompt = "" if self.prompt is None else self.prompt.render(row)
        if self.system is None:
            return {"prompt": prompt}
        system = {"role": "system", "content": self.system.render(row)}
        return {"messages": [system, {"role": "user", "content": prompt}]}


def _text(column: str, value: object) -> str:
    """The value of a column as text. Raises `InvalidRequest` for bytes that are not UTF-8."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"column {column!r} holds bytes that are not UTF-8", param=column, code="invalid_encoding"
            ) from error
    if isinstance(value, (dict, list)):
        return msgspec.json.encode(value, enc_hook=json_value).decode()
    return str(value)


def json_value(value: Any) -> str:
    """Return the text by which JSON states a value of a type that it does not know, such as a time of pandas."""
    return str(value.isoformat()) if hasattr(value, "isoformat") else str(value)


def _empty_for_none(value: object) -> object:
    return "" if value is None else value
