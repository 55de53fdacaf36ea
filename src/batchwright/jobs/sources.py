"""Input files as streams of numbered records, of which only a few are in memory at a time."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeAlias, cast, get_args

import msgspec

from batchwright.errors import InputError, InvalidRequest
from batchwright.jobs.compression import reading, without_compression
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath, Version
from batchwright.lines.batch_line import line_too_long, split_lines

InputFormat: TypeAlias = Literal["jsonl", "json", "txt", "csv", "tsv", "parquet", "arrow"]

_FORMAT_OF_SUFFIX: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "txt",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_CHUNK = 2**20
_SPACE = " \t\r\n"
_LONGEST_NAME = 16
"""Characters from the end of a text within which an error may be due to that end."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of text, or one row of a table."""

    number: int
    """Number of the line, from 1, blank lines included (of the first line of a row); in Parquet, of the row; in a JSON
    array, of the element. Numbering continues across the files of a job."""
    content: bytes | Mapping[str, object] | InvalidRequest
    """A line without its end, a row by column, or the reason why it could not be read."""

    @property
    def weight(self) -> int:
        """Bytes of a line; 1 for a row."""
        return len(self.content) if isinstance(self.content, bytes) else 1


class Source(Protocol):
    """An input that can be read any number of times."""

    columns: tuple[str, ...] | None = None
    """Columns of a table, in order; None for an input of lines."""

    def records(self) -> Iterator[Record]:
        """The records that are not blank, by rising number. Raises `InputError` if the file is damaged."""

    def count(self) -> int:
        """Number of records that are not blank."""
        return sum(1 for _ in self.records())

    def measure(self) -> tuple[int, int]:
        """Number of the records, and the sum of their weights, which distinguish long prompts from short ones."""
        count = weight = 0
        for record in self.records():
            count += 1
            weight += record.weight
        return count, weight


def format_of(path: AnyPath, given: str | None) -> InputFormat:
    """The format `given`, or else that of the file's extension. Raises `InputError` for an unknown one."""
    if given is not None:
        if given not in get_args(InputFormat):
            raise InputError(f"input format {given!r}: must be one of {', '.join(get_args(InputFormat))}")
        return cast("InputFormat", given)
    found = format_of_suffix(path.name)
    if found is None:
        raise InputError(
            f"{path}: its extension does not give its format; rename it to one of "
            f"{', '.join(_FORMAT_OF_SUFFIX)} or give --input-format ({', '.join(get_args(InputFormat))})"
        )
    return found


def format_of_suffix(name: str) -> InputFormat | None:
    """The format that the extension of a name stands for; None if it is unknown."""
    return _FORMAT_OF_SUFFIX.get(Path(without_compression(name.lower())).suffix)


def check_encoding(path: AnyPath) -> None:
    """Raise `InputError` if the text in `path` is UTF-16."""
    with reading(path) as file:
        if file.read(2) in _UTF16_BOMS:
            raise InputError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 {path.name}")


class LineSource(Source):
    """A source with one record for each line."""

    def __init__(self, path: AnyPath, *, max_line_bytes: int) -> None:
        self.path = path
        self._max_line_bytes = max_line_bytes

    def records(self) -> Iterator[Record]:
        for number, line in lines_of(self.path, self._max_line_bytes):
            if line is None:
                yield Record(number, line_too_long(self._max_line_bytes))
            elif line.strip():
                yield Record(number, line)


class JsonArraySource(Source):
    """A source with one record for each element of a file that is one JSON array."""

    def __init__(self, path: AnyPath, *, max_line_bytes: int) -> None:
        self._path = path
        self._max_line_bytes = max_line_bytes

    def records(self) -> Iterator[Record]:
        for number, element in enumerate(self._elements(), start=1):
            try:
                line = msgspec.json.encode(element)
            except (ValueError, OverflowError, TypeError) as error:  # half of a surrogate pair, a huge number
                yield Record(
                    number, InvalidRequest(f"this element is not plain JSON: {error}", code="invalid_json_line")
                )
                continue
            long = len(line) > self._max_line_bytes
            yield Record(number, line_too_long(self._max_line_bytes) if long else line)

    def _elements(self) -> Iterator[object]:
        decode = json.JSONDecoder().raw_decode
        with reading(self._path) as file:
            text = _TextWindow(file, self._path)
            if text.next_sign() != "[":
                raise InputError(
                    f"{self._path} is not a JSON array: write one request on each line and name the file .jsonl, or "
                    "put them into [ … ]"
                )
            text.skip(1)
            while (sign := text.next_sign()) != "]":
                if sign == ",":
                    text.skip(1)
                    continue
                yield text.take(decode)
            text.skip(1)
            text.require_end()


class _TextWindow:
    """The part of a text file that is being decoded."""

    def __init__(self, file: IO[bytes], path: AnyPath) -> None:
        import codecs

        self._file = file
        self._path = path
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False

    def next_sign(self) -> str:
        """The next character that is not a space; it is not skipped. Raises `InputError` at the end of the file."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._read_on():
                raise InputError(f"{self._path} is damaged: its JSON array has no end")

    def require_end(self) -> None:
        """Raise `InputError` if anything but space follows."""
        while True:
            rest = self._text[self._at :].lstrip(_SPACE)
            if rest:
                raise InputError(
                    f"{self._path} goes on after its JSON array, with {rest[:20]!r}: put all into one array, or "
                    "write one on each line and name the file .jsonl"
                )
            self._at = len(self._text)
            if not self._read_on():
                return

    def skip(self, count: int) -> None:
        """Skip characters that were read."""
        self._at += count

    def take(self, decode: Any) -> object:
        """Skip the JSON value that begins here, and return it. Raises `InputError` if there is none."""
        while True:
            try:
                value, end = decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                reason: Exception = error
            else:
                # A number may continue in what has not been read yet.
                if end < len(self._text) or not self._read_on():
                    self._at = end
                    return cast("object", value)
                continue
            if self._is_certain(reason) or not self._read_on():
                raise InputError(f"{self._path} is not valid JSON: {reason}") from reason

    def _is_certain(self, error: Exception) -> bool:
        """Return whether what follows cannot mend an error of decoding."""
        if not isinstance(error, json.JSONDecodeError):
            return True
        # A text that is cut elsewhere than in a string fails close to its end: in a name such as -Infinity at most.
        return not error.msg.startswith("Unterminated") and error.pos < len(self._text) - _LONGEST_NAME

    def _read_on(self) -> bool:
        """Append what comes next in the file. Returns False at its end."""
        if self._ended:
            return False
        read = self._file.read(max(_CHUNK, len(self._text) - self._at))
        try:
            self._text = self._text[self._at :] + self._decoder.decode(read, final=not read)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path} is not UTF-8") from error
        self._at = 0
        self._ended = not read
        return bool(read)


class ChainedSource(Source):
    """The records of several sources, one after the other, numbered consecutively."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.columns = sources[0].columns

    def records(self) -> Iterator[Record]:
        offset = 0
        for source in self.sources:
            last = 0
            for record in source.records():
                last = record.number
                yield Record(offset + last, record.content)
            offset += last

    def count(self) -> int:
        return sum(source.count() for source in self.sources)


class SelectedSource(Source):
    """Some of the records of a source: the first `limit`, or `sample` of them drawn with `seed`, or both."""

    def __init__(self, source: Source, *, limit: int | None, sample: int | None, seed: int) -> None:
        """`limit` applies to the records before `sample` of them are drawn."""
        self._source = source
        self.columns = source.columns
        total = source.count()
        self._within = total if limit is None else min(limit, total)
        self._drawn: frozenset[int] | None = None
        if sample is not None and sample < self._within:
            self._drawn = frozenset(random.Random(seed).sample(range(self._within), sample))

    def records(self) -> Iterator[Record]:
        first = islice(self._source.records(), self._within)
        drawn = self._drawn
        return first if drawn is None else (record for index, record in enumerate(first) if index in drawn)

    def count(self) -> int:
        return self._within if self._drawn is None else len(self._drawn)


def lines_of(path: AnyPath, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines without their ends; None for a line of more than `limit` bytes, which is never held whole."""
    with reading(path) as file:
        for number, _, content in split_lines(file, limit):
            yield number, content


def version_of(path: AnyPath) -> Version:
    """The version of a file, which shows later whether it has changed. Raises `InputError` if it does not exist."""
    if isinstance(path, RemotePath):
        return path.version()
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from error
    return Version(found.st_size, None, str(found.st_mtime_ns))


def fingerprint_of(path: AnyPath, version: Version) -> str:
    """The SHA-256 of a file, in hexadecimal, or what its store has in place of it, which needs no reading.

    Raises `InputError` if it cannot be read.
    """
    if version.tag is not None:
        return f"tag:{version.tag}"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(cast("Any", file), "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from error


def begins_with(path: AnyPath, size: int, sha256: str) -> bool:
    """Whether the first `size` bytes of a file have this SHA-256, and are whole lines."""
    digest = hashlib.sha256()
    last = b""
    left = size
    with path.open("rb") as file:
        while left and (read := file.read(min(left, _CHUNK))):
            digest.update(read)
            left -= len(read)
            last = read[-1:]
        return digest.hexdigest() == sha256 and (last == b"\n" or file.read(1) in (b"\n", b"\r"))


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
