"""Results for people to read: the answers in an output beside the prompts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from batchwright.errors import BatchwrightError, InputError, InvalidRequest, shown
from batchwright.jobs.answer_tables import COMPLETION_TOKENS, ERROR, FINISH_REASON, PROMPT_TOKENS
from batchwright.jobs.answers import answer_of
from batchwright.jobs.input_names import expanded
from batchwright.jobs.job import state_path
from batchwright.jobs.lines import Line, LineParser
from batchwright.jobs.output_names import ROWS
from batchwright.jobs.remote.parts import read_manifest
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath, located
from batchwright.jobs.sources import Record, format_of
from batchwright.jobs.table_sources import open_source
from batchwright.lines.batch_line import decode_line
from batchwright.planning.identical import Place

_MAX_LINE_BYTES = 2**30
_MOST_HELD = 16 * 2**20
"""Bytes of prompts that wait in memory for their results; more are in a temporary file."""
_ADDED = (FINISH_REASON, ERROR, PROMPT_TOKENS, COMPLETION_TOKENS)
_ID = re.compile(r"batch_req_.+_([0-9]{1,18})")
"""The `id` of the result of a line, which ends with the line's number."""
_REMEDY = "name the output of `batchwright run`"


@dataclass(frozen=True, slots=True)
class ReadableResult:
    """One result."""

    name: str
    """The custom id of a line; the number of a row."""
    prompt: str | None
    """The prompt, or the columns of the row; None if the input no longer exists."""
    answer: str | None
    error: str | None
    finish_reason: str | None
    tokens: int | None
    """Number of generated tokens."""

    def has(self, text: str) -> bool:
        """Whether `text` occurs anywhere in it, ignoring case."""
        return any(
            text.casefold() in part.casefold() for part in (self.name, self.prompt, self.answer, self.error) if part
        )


def read_results(
    name: str | Path, *, most: int | None = None, failed: bool = False, search: str | None = None
) -> Iterator[ReadableResult]:
    """The results in an output in any form, here or elsewhere: at most `most`, only failed ones or those with `search`.

    Raises `InputError` for a file that is not the output of a run.
    """
    output = located(str(name).rstrip("/") or "/")
    files = [located(each) for each in expanded([str(name)])]
    state = _state_of(output)
    found = (
        result
        for result in _results(output, files, state)
        if (not failed or result.error is not None) and (search is None or result.has(search))
    )
    return islice(found, most)


def _state_of(path: AnyPath) -> Mapping[str, Any]:
    if isinstance(path, RemotePath):
        return _state_elsewhere(path)
    beside = state_path(path)
    try:
        state = json.loads(beside.read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _state_elsewhere(path: RemotePath) -> Mapping[str, Any]:
    for folder in (path, path.with_name(path.name + ROWS)):
        with suppress(OSError, BatchwrightError):
            manifest = read_manifest(folder)
            if manifest is not None and manifest.state is not None:
                return manifest.state
    return {}


def _results(path: AnyPath, files: Sequence[AnyPath], state: Mapping[str, Any]) -> Iterator[ReadableResult]:
    input_format = "jsonl" if not path.suffix else format_of(path, None)
    if input_format not in ("jsonl", "csv", "tsv", "parquet"):
        raise InputError(f"{path} is no output of a run: that is .jsonl, .csv, .tsv or .parquet")
    if not files:
        return
    source = open_source(files, input_format, max_line_bytes=_MAX_LINE_BYTES)
    column = str((state.get("table") or {}).get("answer", "answer"))
    with SpooledTemporaryFile(_MOST_HELD) as file:
        prompts = _Prompts(_prompts(state), file)
        for position, record in enumerate(source.records(), start=1):
            fields = _fields(record, path)
            if {"custom_id", "response", "error"} <= fields.keys():
                yield _result(fields, prompts, f"{path}, line {record.number}")
            else:
                yield _row(position, fields, column, path)


def _fields(record: Record, path: AnyPath) -> Mapping[str, Any]:
    """The fields of a result line, or the columns of a row. Raises `InputError` for a line that is not JSON."""
    fields: Mapping[str, object] | InvalidRequest
    try:
        fields = decode_line(record.content) if isinstance(record.content, bytes) else record.content
    except InvalidRequest as error:
        fields = error
    if not isinstance(fields, Mapping):
        raise InputError(f"{path}, line {record.number}: {fields}")
    return fields


def _result(fields: Mapping[str, Any], prompts: _Prompts, place: str) -> ReadableResult:
    """The result in a line. `place`: the file and the line, for the message. Raises `InputError` for another's line."""
    named, response, error = _ID.fullmatch(str(fields.get("id"))), fields["response"], fields["error"]
    if named is None or not all(each is None or isinstance(each, dict) for each in (response, error)):
        raise InputError(f"{place}: no run wrote this result, whose id is {shown(fields.get('id'))}; {_REMEDY}")
    _, answer = answer_of(response, error)
    return ReadableResult(
        str(fields["custom_id"]),
        prompts.take(int(named[1])),
        _text(answer.answer),
        answer.error,
        answer.finish_reason,
        answer.completion_tokens,
    )


class _Prompts:
    """The prompts of an input by the numbers of their lines, read only as far as they are wanted.

    Results may be in any order: prompts that are read before their results wait in a file.
    """

    def __init__(self, prompts: Iterator[tuple[int, str | None]], file: IO[bytes]) -> None:
        """`prompts`: the numbers and prompts, by rising number. `file`: an empty file for those that wait."""
        self._prompts = prompts
        self._read = 0
        """Number of the last line that was read."""
        self._file = file
        self._waiting: dict[int, Place] = {}

    def take(self, number: int) -> str | None:
        """The prompt of a line; None if it has none, or was taken before."""
        while self._read < number and (read := next(self._prompts, None)) is not None:
            self._read, prompt = read
            if self._read == number:
                return prompt
            if prompt is not None:
                self._waiting[self._read] = self._written(prompt)
        place = self._waiting.pop(number, None)
        if place is None:
            return None
        self._file.seek(place.offset)
        return self._file.read(place.size).decode(errors="surrogatepass")

    def _written(self, prompt: str) -> Place:
        content = prompt.encode(errors="surrogatepass")
        offset = self._file.seek(0, os.SEEK_END)
        self._file.write(content)
        return Place(offset, len(content))


def _row(number: int, row: Mapping[str, object], column: str, path: AnyPath) -> ReadableResult:
    if column not in row or ERROR not in row:
        raise InputError(f"{path} has no columns {column!r} and {ERROR!r}: it is no output of a run")
    shown_apart = {column, *_ADDED, *_properties(row[column])}
    others = [name for name in row if name not in shown_apart]
    prompt = "\n".join(f"{name}: {_text(row[name])}" for name in others if row[name] not in (None, ""))
    tokens = _text(row.get(COMPLETION_TOKENS))
    if tokens and not tokens.isdecimal():
        raise InputError(f"{path}, row {number}: {COMPLETION_TOKENS} is {shown(tokens)}, not a number; {_REMEDY}")
    return ReadableResult(
        f"row {number}",
        prompt or None,
        _text(row[column]) or None,
        _text(row[ERROR]) or None,
        _text(row.get(FINISH_REASON)) or None,
        int(tokens) if tokens else None,
    )


def _properties(answer: object) -> Collection[str]:
    """Return the names of the columns that an answer in JSON may also have as properties, which would appear twice."""
    if not isinstance(answer, str) or not answer.lstrip().startswith("{"):
        return ()
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return ()
    return value if isinstance(value, dict) else ()


def _prompts(state: Mapping[str, Any]) -> Iterator[tuple[int, str | None]]:
    """The numbers and prompts of the lines of the input, as far as it still exists."""
    files = [located(file["name"]) for file in state.get("files", ())]
    if not files or not all(path.exists() for path in files):
        return
    parameters = state.get("parameters", {})
    input_format = format_of(files[0], parameters.get("input_format"))
    parser = LineParser(input_format, max_line_bytes=_MAX_LINE_BYTES)
    for record in open_source(files, input_format, max_line_bytes=_MAX_LINE_BYTES).records():
        line = parser.parse(record)
        yield record.number, _prompt(line.body) if isinstance(line, Line) else None


def _prompt(body: Mapping[str, Any]) -> str | None:
    messages = body.get("messages")
    if isinstance(messages, list):
        return "\n".join(
            f"{message.get('role')}: {_text(message.get('content'))}"
            for message in messages
            if isinstance(message, dict)
        )
    given = body.get("prompt", body.get("input"))
    return None if given is None else _text(given)


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
