"""Tables as streams of rows: CSV, JSON objects whose fields are the columns, and what Arrow reads."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence

from batchwright.errors import InputError, InvalidRequest
from batchwright.jobs.arrow_sources import ArrowSource, ParquetSource
from batchwright.jobs.remote.remote_file import AnyPath
from batchwright.jobs.sources import (
    ChainedSource,
    InputFormat,
    JsonArraySource,
    LineSource,
    Record,
    Source,
    check_encoding,
    lines_of,
)
from batchwright.lines.batch_line import decode_line, line_too_long


def open_source(
    paths: Sequence[AnyPath],
    input_format: InputFormat,
    *,
    max_line_bytes: int,
    wanted: Collection[str] | None = None,
    rows: bool = False,
) -> Source:
    """The source of the records of `paths`, one file after the other. Raises `InputError` if one cannot be read.

    `wanted`: the columns of a table that will be used, so that others need not be read; None: all. `rows`: whether JSON
    objects are rows of a table rather than requests.
    """
    sources = [_source_of(path, input_format, max_line_bytes, wanted) for path in paths]
    for path, source in zip(paths, sources, strict=True):
        if source.columns != sources[0].columns:
            raise InputError(
                f"{path} has the columns {', '.join(map(repr, source.columns or ()))}, and {paths[0]} has "
                f"{', '.join(map(repr, sources[0].columns or ()))}: give files with the same columns"
            )
    source = sources[0] if len(sources) == 1 else ChainedSource(sources)
    return JsonRowSource(source) if rows and input_format in ("jsonl", "json") else source


def _source_of(path: AnyPath, input_format: InputFormat, max_line_bytes: int, wanted: Collection[str] | None) -> Source:
    if input_format == "parquet":
        return ParquetSource(path, wanted)
    if input_format == "arrow":
        return ArrowSource(path, wanted)
    check_encoding(path)
    if input_format in ("csv", "tsv"):
        return CsvSource(path, delimiter="," if input_format == "csv" else "\t", max_line_bytes=max_line_bytes)
    if input_format == "json":
        return JsonArraySource(path, max_line_bytes=max_line_bytes)
    return LineSource(path, max_line_bytes=max_line_bytes)


class JsonRowSource(Source):
    """A source with one record for each JSON object, whose fields are the columns."""

    def __init__(self, objects: Source) -> None:
        """Reads `objects` once, for the names of the columns: all fields, in the order in which they first appear."""
        self._objects = objects
        self._count = 0
        self.types: dict[str, set[type]] = {}
        """Types of the values of each column. A whole number that is too large for 64 bits is an `object`."""
        for record in self.records():
            self._count += 1
            if isinstance(record.content, Mapping):
                for name, value in record.content.items():
                    small = type(value) is not int or -(2**63) <= value < 2**63
                    self.types.setdefault(name, set()).add(type(value) if small else object)
        self.columns = tuple(self.types)

    def records(self) -> Iterator[Record]:
        for record in self._objects.records():
            content = record.content
            if isinstance(content, bytes):
                try:
                    content = decode_line(content)
                except InvalidRequest as error:
                    content = error
            yield Record(record.number, content)

    def count(self) -> int:
        return self._count

    def measure(self) -> tuple[int, int]:
        return self._count, self._count


class TextRowSource(Source):
    """A source with one record for each line of text, as the column `prompt`."""

    columns = ("prompt",)

    def __init__(self, lines: Source) -> None:
        self._lines = lines

    def records(self) -> Iterator[Record]:
        for record in self._lines.records():
            content = record.content
            yield Record(
                record.number, {"prompt": content.decode(errors="replace")} if isinstance(content, bytes) else content
            )


class CsvSource(Source):
    """A source with one record for each row of a table with a header, quoted as in RFC 4180."""

    columns: tuple[str, ...]

    def __init__(self, path: AnyPath, *, delimiter: str, max_line_bytes: int) -> None:
        self._path = path
        self._delimiter = delimiter
        self._max_line_bytes = max_line_bytes
        self.columns = self._header()

    def _header(self) -> tuple[str, ...]:
        for _, row in self._rows():
            if isinstance(row, InvalidRequest):
                raise InputError(f"{self._path}: its header cannot be read: {row}")
            if len(set(row)) < len(row):
                raise InputError(f"{self._path}: its header has a column twice: {', '.join(map(repr, row))}")
            return tuple(row)
        raise InputError(f"{self._path} is empty: its first line must name the columns")

    def records(self) -> Iterator[Record]:
        rows = self._rows()
        next(rows, None)
        for number, row in rows:
            if isinstance(row, InvalidRequest):
                yield Record(number, row)
            elif len(row) != len(self.columns):
                fault = f"the row has {len(row)} fields where the header has {len(self.columns)}: is a quote missing?"
                yield Record(number, InvalidRequest(fault, code="invalid_row"))
            else:
                yield Record(number, dict(zip(self.columns, row, strict=True)))

    def _rows(self) -> Iterator[tuple[int, list[str] | InvalidRequest]]:
        lines = _CsvLines(lines_of(self._path, self._max_line_bytes), self._max_line_bytes)
        # Strict: a quote in the wrong place is an error of its row, and must not silently change a prompt.
        reader = csv.reader(lines, delimiter=self._delimiter, strict=True)
        while True:
            number = lines.number + 1
            lines.undecodable = False
            # The limit is global in the csv module; it also ends a quote that is never closed. After an error the
            # reader goes on with the next line.
            before = csv.field_size_limit(self._max_line_bytes)
            row: list[str] | InvalidRequest | None
            try:
                row = next(reader, None)
            except InvalidRequest as error:
                row = error
            except csv.Error as error:
                row = InvalidRequest(f"the row is not CSV: {error}", code="invalid_row")
            finally:
                csv.field_size_limit(before)
            if row is None:
                return
            if lines.undecodable:
                row = InvalidRequest("the row is not UTF-8", code="invalid_encoding")
            if row:
                yield number, row


class _CsvLines:
    """Iterator of text lines for the csv module, which, unlike a generator, continues after it raised."""

    def __init__(self, lines: Iterator[tuple[int, bytes | None]], max_line_bytes: int) -> None:
        self._lines = lines
        self._max_line_bytes = max_line_bytes
        self.number = 0
        self.undecodable = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        if line is None:
            raise line_too_long(self._max_line_bytes)
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError:
            self.undecodable = True
            return line.decode(errors="replace") + "\n"
