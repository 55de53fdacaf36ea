"""Input files as streams of numbered records, few of which are in memory at a time."""

from __future__ import annotations

import csv
import gzip
import hashlib
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeAlias, cast, get_args

from batchwright.errors import InputError, InvalidRequest
from batchwright.lines.batch_line import line_too_long, split_lines

InputFormat: TypeAlias = Literal["jsonl", "txt", "csv", "tsv", "parquet"]

_FORMAT_OF_SUFFIX: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_ROWS_AT_A_TIME = 256
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class Record:
    """One line of text, or one row of a table."""

    number: int
    """Number of the line, from 1, blank lines included (of the first line of a row); in Parquet, of the row."""
    content: bytes | Mapping[str, object] | InvalidRequest
    """A line without its end, a row by column, or the reason why it could not be read."""


class Source(Protocol):
    """An input that can be read any number of times."""

    columns: tuple[str, ...] | None = None
    """Columns of a table; None for an input of lines."""

    def records(self) -> Iterator[Record]:
        """The records that are not blank, by rising number. Raises `InputError` if the file is damaged."""

    def count(self) -> int:
        """Number of records that are not blank."""
        return sum(1 for _ in self.records())


def format_of(path: Path, given: str | None) -> InputFormat:
    """The format `given`, or else that of the file's extension. Raises `InputError` for an unknown one."""
    if given is not None:
        if given not in get_args(InputFormat):
            raise InputError(f"input format {given!r}: must be one of {', '.join(get_args(InputFormat))}")
        return cast("InputFormat", given)
    found = _FORMAT_OF_SUFFIX.get(Path(path.name.lower().removesuffix(".gz")).suffix)
    if found is None:
        raise InputError(
            f"{path}: its extension does not tell its format; rename it to one of "
            f"{', '.join(_FORMAT_OF_SUFFIX)} or give --input-format ({', '.join(get_args(InputFormat))})"
        )
    return found


def open_source(
    path: Path, input_format: InputFormat, *, max_line_bytes: int, wanted: Collection[str] | None = None
) -> Source:
    """The source of the records of `path`. Raises `InputError` if it cannot be read as `input_format`.

    `wanted`: the columns of a table that will be used, so that others need not be read; None: all.
    """
    if input_format == "parquet":
        return ParquetSource(path, wanted)
    with _reading(path) as file:
        if file.read(2) in _UTF16_BOMS:
            raise InputError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path.name}")
    if input_format in ("csv", "tsv"):
        return CsvSource(path, delimiter="," if input_format == "csv" else "\t", max_line_bytes=max_line_bytes)
    return LineSource(path, max_line_bytes=max_line_bytes)


class LineSource(Source):
    """A source with one record for each line."""

    def __init__(self, path: Path, *, max_line_bytes: int) -> None:
        self._path = path
        self._max_line_bytes = max_line_bytes

    def records(self) -> Iterator[Record]:
        for number, line in _lines(self._path, self._max_line_bytes):
            if line is None:
                yield Record(number, line_too_long(self._max_line_bytes))
            elif line.strip():
                yield Record(number, line)


class CsvSource(Source):
    """A source with one record for each row of a table with a header, quoted as RFC 4180 says."""

    columns: tuple[str, ...]

    def __init__(self, path: Path, *, delimiter: str, max_line_bytes: int) -> None:
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
        lines = _CsvLines(_lines(self._path, self._max_line_bytes), self._max_line_bytes)
        # Strict: a quote in the wrong place is an error of its row: it must not silently change a prompt.
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
    """Iterator of text lines for the csv module, which, unlike a generator, goes on after it raised."""

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


class ParquetSource(Source):
    """A source with one record for each row of a Parquet file. Needs the extra `parquet`."""

    def __init__(self, path: Path, wanted: Collection[str] | None = None) -> None:
        self._path = path
        with self._file() as file:
            self.columns = tuple(cast("list[str]", file.schema_arrow.names))
            self._count = cast("int", file.metadata.num_rows)
        self._read = [column for column in self.columns if wanted is None or column in wanted]

    def records(self) -> Iterator[Record]:
        number = 0
        with self._file() as file:
            batches = file.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=self._read)
            while (batch := self._next(batches)) is not None:
                for row in _rows_of(batch):
                    number += 1
                    yield Record(number, row)

    def _next(self, batches: Iterator[Any]) -> Any:
        import pyarrow as pa

        try:
            return next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is damaged: {error}") from error

    def count(self) -> int:
        return self._count

    def _file(self) -> Any:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise InputError(
                f"{self._path}: Parquet needs pyarrow; install it: pip install 'batchwright[parquet]'"
            ) from error
        try:
            return pq.ParquetFile(self._path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self._path} cannot be read as Parquet: {error}") from error


def _rows_of(batch: Any) -> Iterable[Mapping[str, object] | InvalidRequest]:
    try:
        return cast("list[Mapping[str, object]]", batch.to_pylist())
    except (ValueError, OverflowError):
        # A single value is at fault, and all other rows can still be read.
        return (_row(batch, index) for index in range(batch.num_rows))


def _row(batch: Any, index: int) -> Mapping[str, object] | InvalidRequest:
    row: dict[str, object] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[index].as_py()
        except UnicodeDecodeError:
            return InvalidRequest(f"column {name!r} holds text that is not UTF-8", param=name, code="invalid_encoding")
        except (ValueError, OverflowError) as error:
            return InvalidRequest(f"column {name!r} holds a value that cannot be read: {error}", param=name)
    return row


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        if path.suffix.lower() == ".gz":
            with gzip.open(path, "rb") as file:
                yield cast("IO[bytes]", file)
        else:
            with path.open("rb") as plain:
                yield plain
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _lines(path: Path, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their ends; None for a line of more than `limit` bytes, which is never held whole."""
    with _reading(path) as file:
        for number, _, content in split_lines(file, limit):
            yield number, content


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal. Raises `InputError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from error


class Spool:
    """A file with the content of a stream, so that it can be counted, compared and read again without holding it."""

    def __init__(self, name: str, kept: Path | None) -> None:
        """Reads the stream `name` (`-`: standard input) to its end. Raises OSError; after any error no file is left.

        `kept`: the path that `keep` gives the file, or None for a temporary file that is never kept.
        """
        self._kept = kept
        if kept is None:
            with tempfile.NamedTemporaryFile(prefix="batchwright-", suffix=".input", delete=False) as file:
                self.path = Path(file.name)
        else:
            self.path = kept.with_name(kept.name + ".tmp")
        try:
            self.sha256 = self._read(name)
        except BaseException:
            self.remove()
            raise

    def _read(self, name: str) -> str:
        digest = hashlib.sha256()
        with ExitStack() as stack:
            spool = stack.enter_context(self.path.open("wb"))
            stream = sys.stdin.buffer if name == "-" else stack.enter_context(Path(name).open("rb"))
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                spool.write(chunk)
        return digest.hexdigest()

    def keep(self) -> Path:
        """Make the file outlive this run, in place of that of an earlier run. Returns its path from now on."""
        if self._kept is not None:
            self.path = self.path.replace(self._kept)
        return self.path

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
