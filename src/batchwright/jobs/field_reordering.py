"""Prompts whose independent fields are ordered so that the rows of a table share the most.

Fields are independent if each is on a line of its own: two or more lines in a row of the prompt template that name
columns, such as `Product: {product}`. Text before and after them stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from batchwright.errors import InputError, InvalidRequest, shown
from batchwright.jobs.block_sample import BlockSample
from batchwright.jobs.sources import Source
from batchwright.jobs.templates import PromptTemplate, Templates
from batchwright.planning.field_order import FieldOrder, FieldReuse, reuse_of

_SAMPLED = 32_768
"""Rows among which groups are looked for."""
_SAMPLED_BYTES = 2**26
_LEAST_FIELDS = 2


@dataclass(frozen=True, slots=True)
class ReorderedPrompt:
    """A prompt template in which the order of some lines depends on the row."""

    before: PromptTemplate
    fields: tuple[PromptTemplate, ...]
    after: PromptTemplate
    order: FieldOrder

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the template reads, each once."""
        return tuple(dict.fromkeys(name for each in (self.before, *self.fields, self.after) for name in each.columns))

    def render(self, row: Mapping[str, object]) -> str:
        """The text for one row, where a cell without a value is empty. Raises `InvalidRequest`."""
        lines = [each.render(row) for each in self.fields]
        ordered = "\n".join(lines[number] for number in self.order.of(lines))
        return f"{self.before.render(row)}{ordered}{self.after.render(row)}"


def check_fields(templates: Templates | None) -> None:
    """Raise `InputError` unless the prompt template has independent fields."""
    _parted(_prompt_of(templates))


def reordered(templates: Templates, source: Source) -> tuple[Templates, FieldReuse]:
    """`templates` with the fields of the prompt in the best order for the rows of `source`, and what that gains.

    All rows are read, and a sample of them is compared. Raises `InputError` like `check_fields`.
    """
    before, fields, after = _parted(_prompt_of(templates))
    rows = _sample(source, fields)
    order = FieldOrder(rows)
    return replace(templates, prompt=ReorderedPrompt(before, fields, after, order)), reuse_of(rows, order)


def _prompt_of(templates: Templates | None) -> PromptTemplate:
    if templates is None or not isinstance(templates.prompt, PromptTemplate):
        raise InputError("--reorder-fields is for the fields of a prompt template: give --prompt-template")
    return templates.prompt


def _parted(template: PromptTemplate) -> tuple[PromptTemplate, tuple[PromptTemplate, ...], PromptTemplate]:
    """The text before the first independent fields of a template, these fields, and the text after them."""
    lines = _lines(template)
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and lines[end].columns:
            end += 1
        if end - start >= _LEAST_FIELDS:
            before = _joined([*lines[:start], PromptTemplate(())] if start else [])
            after = _joined([PromptTemplate(()), *lines[end:]] if end < len(lines) else [])
            return before, tuple(lines[start:end]), after
        start = end + 1
    raise InputError(
        f"--reorder-fields: the prompt template {shown(_text(template))} has no two lines in a row with columns; write "
        "each field that may come anywhere among the others on a line of its own, such as 'Product: {product}'"
    )


def _lines(template: PromptTemplate) -> list[PromptTemplate]:
    lines: list[list[tuple[str, str | None]]] = [[]]
    for literal, column in template.parts:
        first, *others = literal.split("\n")
        lines[-1].append((first, None))
        lines += [[(text, None)] for text in others]
        if column is not None:
            lines[-1].append(("", column))
    return [PromptTemplate(tuple(parts)) for parts in lines]


def _joined(lines: list[PromptTemplate]) -> PromptTemplate:
    parts: list[tuple[str, str | None]] = []
    for number, line in enumerate(lines):
        parts += [("\n", None)] if number else []
        parts += line.parts
    return PromptTemplate(tuple(parts))


def _text(template: PromptTemplate) -> str:
    return "".join(literal + (f"{{{column}}}" if column is not None else "") for literal, column in template.parts)


def _sample(source: Source, fields: tuple[PromptTemplate, ...]) -> list[tuple[str, ...]]:
    """The fields of some rows, in the order of the input."""
    sample = BlockSample[tuple[str, ...]](_SAMPLED, _SAMPLED_BYTES)
    for record in source.records():
        if not sample.wants_next() or not isinstance(record.content, Mapping):
            continue
        with suppress(InvalidRequest):  # which fails the row
            row = tuple(each.render(record.content) for each in fields)
            sample.add(row, sum(map(len, row)))
    return sample.items
