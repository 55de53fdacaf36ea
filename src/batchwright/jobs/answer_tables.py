"""Tables of answers: the rows of the input with their answers, made from the results when all are there."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, BinaryIO, TypeAlias, TypeVar

import msgspec

from batchwright.errors import InputError
from batchwright.jobs.answers import Answer, AnswerKind, read_answer
from batchwright.jobs.arrow_sources import ColumnarSource
from batchwright.jobs.compression import compressing, pyarrow_for
from batchwright.jobs.output_forms import OutputForm
from batchwright.jobs.remote.parts import OutputTarget
from batchwright.jobs.resume import ResultsByNumber
from batchwright.jobs.schema_columns import PropertyColumn, TooLargeForColumn, values_of
from batchwright.jobs.sources import ChainedSource, Source
from batchwright.jobs.table_sources import JsonRowSource
from batchwright.jobs.templates import json_value

FINISH_REASON, ERROR, PROMPT_TOKENS, COMPLETION_TOKENS = "finish_reason", "error", "prompt_tokens", "completion_tokens"
COST = "cost"
_ROWS_IN_A_GROUP = 8192
"""Rows of a table that are in memory at a time, which is one row group of Parquet."""
_encode = msgspec.json.Encoder(enc_hook=json_value).encode
_T = TypeVar("_T")
_Found: TypeAlias = tuple[AnswerKind | None, Answer]


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table of answers."""

    keep: tuple[str, ...] | None = None
    """Columns of the input that are kept, in this order; None: all."""
    answer: str = "answer"
    """Name of the column of answers."""

    properties: tuple[PropertyColumn, ...] = ()
    """Columns for the properties of answers that are objects."""
    cost: bool = False
    """Whether there is a column for what each answer cost, in dollars."""

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the columns that are added."""
        names = (column.name for column in self.properties)
        last = (COST,) if self.cost else ()
        return (self.answer, *names, FINISH_REASON, ERROR, PROMPT_TOKENS, COMPLETION_TOKENS, *last)

    def values(self, answer: Answer, *, typed: bool = False) -> tuple[object, ...]:
        """Values of the columns that are added; `typed`: whether those of properties have the types of their columns.

        Raises `TooLargeForColumn` for a value that is to be `typed` and cannot be.
        """
        found: list[object] = values_of(self.properties, answer.answer)
        if typed:
            found = [column.typed(value) for column, value in zip(self.properties, found, strict=True)]
        return (answer.answer, *found, *(answer[1:] if self.cost else answer[1:-1]))

    def with_text(self, column: PropertyColumn) -> TableColumns:
        """Return these columns, with that of one property as JSON text, which holds any value."""
        text = PropertyColumn(column.name, "json")
        return replace(self, properties=tuple(text if each == column else each for each in self.properties))

    def kept(self, available: Sequence[str]) -> tuple[str, ...]:
        """The columns of the input that are kept. Raises `InputError` for one that is missing, or in the way."""
        kept = tuple(available) if self.keep is None else self.keep
        missing = [name for name in kept if name not in available]
        if missing:
            raise InputError(
                f"keep: the input has no column {', '.join(map(repr, missing))}, but {', '.join(map(repr, available))}"
            )
        if self.answer in kept:
            raise InputError(
                f"the input itself has a column {self.answer!r}: name that of the answers with --output-column NAME, "
                "or say with --keep which columns of the input to keep"
            )
        if clash := [name for name in kept if name in self.added]:
            raise InputError(
                f"the input has columns that the output adds: {', '.join(map(repr, clash))}; say with --keep which "
                "columns of the input to keep"
            )
        if twice := sorted({name for name in self.added if self.added.count(name) > 1}):
            raise InputError(
                f"the output would have two columns {', '.join(map(repr, twice))}: "
                + (
                    "name that of the answers otherwise with --output-column NAME"
                    if twice == [self.answer]
                    else "give these properties other names in the schema"
                )
            )
        return kept

    def row(self, kept: Sequence[str], row: object, answer: Answer) -> dict[str, object]:
        """A row of the table, by column."""
        values = row if isinstance(row, Mapping) else {}
        return {**{name: values.get(name) for name in kept}, **dict(zip(self.added, self.values(answer), strict=True))}


def write_lines(lines: Iterable[bytes], target: OutputTarget, form: OutputForm) -> None:
    """Write result lines. Raises OSError."""
    with target.making() as new_file:
        for some in _in_files(lines, target.rows_in_file):
            with new_file() as file, compressing(file, form.compression) as packed:
                for line in some:
                    packed.write(line)


def write_table(
    source: Source, results: ResultsByNumber, target: OutputTarget, form: OutputForm, columns: TableColumns
) -> None:
    """Write the rows of `source` that have a result, with their answers, in the order of the input. Raises OSError."""
    kept = columns.kept(source.columns or ())
    if form.content == "parquet":
        _write_parquet(source, results, target, columns, kept)
        return
    with target.making() as new_file:
        for rows in _in_files(_joined(source, results), target.rows_in_file):
            with new_file() as file, compressing(file, form.compression) as packed:
                _write_rows(rows, packed, form, columns, kept)


def _in_files(items: Iterable[_T], most: int | None) -> Iterator[Iterator[_T]]:
    """The items of each file; there is at least one file."""
    left = iter(items)
    if most is None:
        yield left
        return
    first = next(left, None)
    if first is None:
        yield iter(())
    while first is not None:
        yield chain((first,), islice(left, most - 1))
        first = next(left, None)


def _write_rows(
    rows: Iterable[tuple[object, _Found]], file: BinaryIO, form: OutputForm, columns: TableColumns, kept: Sequence[str]
) -> None:
    if form.content == "jsonl":
        for row, (_, answer) in rows:
            file.write(_encode(columns.row(kept, row, answer)) + b"\n")
        return
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, delimiter="\t" if form.content == "tsv" else ",", lineterminator="\n")
    writer.writerow([*kept, *columns.added])
    for row, (_, answer) in rows:
        writer.writerow([_cell(value) for value in columns.row(kept, row, answer).values()])
    text.detach()


def _joined(source: Source, results: ResultsByNumber) -> Iterator[tuple[object, _Found]]:
    for record in source.records():
        if (result := results.get(record.number)) is not None:
            yield record.content, read_answer(result)


def _cell(value: object) -> object:
    if isinstance(value, (dict, list)):
        return _encode(value).decode()
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def _write_parquet(
    source: Source, results: ResultsByNumber, target: OutputTarget, columns: TableColumns, kept: Sequence[str]
) -> None:
    first: str = next((kind for kind, _ in map(read_answer, results) if kind is not None), "text")
    while True:
        try:
            _write_groups(source, results, target, columns, kept, first)
            return
        except _MixedKinds:
            first = "other"
        except TooLargeForColumn as error:
            columns = columns.with_text(error.column)


class _MixedKinds(Exception):
    """The answers are not all of the kind that the first one is."""


def _write_groups(
    source: Source,
    results: ResultsByNumber,
    target: OutputTarget,
    columns: TableColumns,
    kept: Sequence[str],
    kind: str,
) -> None:
    """Write a Parquet file whose answers are all of one kind, or are JSON if it is "other".

    Raises `_MixedKinds`, and `TooLargeForColumn`.
    """
    pa = pyarrow_for("Parquet")
    import pyarrow.parquet as pq

    of_kind = {"text": pa.string(), "texts": pa.list_(pa.string()), "vector": pa.list_(pa.float32())}
    of_properties = [_property_type(pa, column) for column in columns.properties]
    types = [of_kind.get(kind, pa.string()), *of_properties, pa.string(), pa.string(), pa.int64(), pa.int64()]
    types += [pa.float64()] if columns.cost else []
    files = _parquet_files(source)
    schema = _inferred_schema(pa, source, kept) if files is None else _schema_of(files, kept)
    for name, data_type in zip(columns.added, types, strict=True):
        schema = schema.append(pa.field(name, data_type))
    groups = _converted(pa, source, results, kept, schema) if files is None else _copied(pa, files, results, kept)
    in_file = None if target.rows_in_file is None else max(1, target.rows_in_file // _ROWS_IN_A_GROUP)
    with target.making() as new_file:
        for some in _in_files(groups, in_file):
            with new_file() as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for arrays, group in some:
                    answers = [columns.values(_of_kind(kind, found, answer), typed=True) for found, answer in group]
                    values = zip(zip(*answers, strict=True), types, strict=True)
                    added = [pa.array(column, each) for column, each in values]
                    writer.write_batch(pa.record_batch([*arrays, *added], schema=schema))


def _property_type(pa: Any, column: PropertyColumn) -> Any:
    kinds = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
    found = kinds.get(column.kind, pa.string())
    return pa.list_(found) if column.is_list else found


def _of_kind(kind: str, found: AnswerKind | None, answer: Answer) -> Answer:
    if kind == "other":
        return answer._replace(answer=_json(answer.answer))
    if found not in (kind, None):
        raise _MixedKinds
    return answer


def _parquet_files(source: Source) -> list[ColumnarSource] | None:
    """The files of a source if they have typed columns, which can be copied as they are."""
    sources = source.sources if isinstance(source, ChainedSource) else [source]
    files = [each for each in sources if isinstance(each, ColumnarSource)]
    return files if len(files) == len(sources) else None


def _schema_of(files: Sequence[ColumnarSource], kept: Sequence[str]) -> Any:
    """The Arrow schema of the kept columns, which all files must have. Raises `InputError`."""
    first = files[0].schema(kept)
    for file in files[1:]:
        if not file.schema(kept).equals(first):
            raise InputError(
                f"{file.path} and {files[0].path} have columns of different types: convert one of them, or say with "
                "--keep which columns to keep"
            )
    return first


def _copied(
    pa: Any, files: Sequence[ColumnarSource], results: ResultsByNumber, kept: Sequence[str]
) -> Iterator[tuple[list[Any], list[_Found]]]:
    number = 0
    for file in files:
        for batch in file.batches(kept, _ROWS_IN_A_GROUP):
            found = [(row, results.get(number + row + 1)) for row in range(batch.num_rows)]
            number += batch.num_rows
            rows = [row for row, result in found if result is not None]
            if rows:
                chosen = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
                yield chosen.columns, [read_answer(result) for _, result in found if result is not None]


def _inferred_schema(pa: Any, source: Source, kept: Sequence[str]) -> Any:
    """A schema from the types of JSON values; text for mixed ones, for lists and objects (as JSON), and for CSV."""
    simple = {
        frozenset({bool}): pa.bool_(),
        frozenset({int}): pa.int64(),
        frozenset({float}): pa.float64(),
        frozenset({int, float}): pa.float64(),
    }
    found = source.types if isinstance(source, JsonRowSource) else {}
    types = {name: frozenset(found.get(name, set()) - {type(None)}) for name in kept}
    return pa.schema([(name, simple.get(types[name], pa.string())) for name in kept])


def _converted(
    pa: Any, source: Source, results: ResultsByNumber, kept: Sequence[str], schema: Any
) -> Iterator[tuple[list[Any], list[_Found]]]:
    joined = _joined(source, results)
    while group := [*islice(joined, _ROWS_IN_A_GROUP)]:
        rows = [row if isinstance(row, Mapping) else {} for row, _ in group]
        arrays = []
        for index, name in enumerate(kept):
            values = [row.get(name) for row in rows]
            data_type = schema.types[index]
            if data_type == pa.string():
                values = [_json(value) for value in values]
            elif data_type == pa.float64():
                # Arrow would refuse a whole number that no float equals.
                values = [value if value is None else float(value) for value in values]
            arrays.append(pa.array(values, data_type))
        yield arrays, [found for _, found in group]


def _json(value: object) -> str | None:
    """A value as text: text as it is, anything else as JSON."""
    return value if value is None or isinstance(value, str) else _encode(value).decode()
