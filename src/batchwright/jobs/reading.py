"""Results for people to read: the answers in an output beside the prompts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from batchwright.errors import BatchwrightError, InputError
from batchwright.jobs.answer_tables import COMPLETION_TOKENS, ERROR, FINISH_REASON, PROMPT_TOKENS
from batchwright.jobs.answers import answer_of
from batchwright.jobs.input_names import expanded
from batchwright.jobs.job import ROWS_SUFFIX, state_path
from batchwright.jobs.lines import Line, LineParser
from batchwright.jobs.remote.parts import read_manifest
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath, located
from batchwright.jobs.sources import format_of
from batchwright.jobs.table_sources import open_source
from batchwright.lines.batch_line import decode_line

_MAX_LINE_BYTES = 2**30
_ADDED = (FINISH_REASON, ERROR, PROMPT_TOKENS, COMPLETION_TOKENS)


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
    for folder in (path, path.with_name(path.name + ROWS_SUFFIX)):
        with suppress(OSError, BatchwrightError):
            manifest = read_manifest(folder)
            if manifest is not None and manifest.state is not None:
                return manifest.state
    return {}


def _results(path: AnyPath, files: Sequence[AnyPath], state: Mapping[str, Any]) -> Iterator[ReadableResult]:
    input_format = "jsonl" if not path.suffix else format_of(path, None)
    if input_format not in ("jsonl", "csv", "tsv", "parquet"):
        raise InputError(f"{path} is no output of a run: that is .jsonl, .csv, .tsv or .parquet")
    prompts: Iterator[tuple[int, str | None]] | None = None
    waiting: dict[int, str | None] = {}
    if not files:
        return
    source = open_source(files, input_format, max_line_bytes=_MAX_LINE_BYTES)
    for position, record in enumerate(source.records(), start=1):
        content = record.content
        fields = decode_line(content) if isinstance(content, bytes) else content
        if not isinstance(fields, Mapping):
            raise InputError(f"{path}, line {record.number}: {fields}")
        if not ({"response", "error"} <= fields.keys() and "custom_id" in fields):
            yield _row(position, fields, str((state.get("table") or {}).get("answer", "answer")), path)
            continue
        if prompts is None:
            prompts = _prompts(state)
        number = int(str(fields.get("id")).rpartition("_")[2])
        while number not in waiting and (read := next(prompts, None)) is not None:
            waiting[read[0]] = read[1]
        result: Mapping[str, Any] = fields
        _, answer = answer_of(result["response"], result["error"])
        prompt = waiting.pop(number, None)
        text = _text(answer.answer)
        yield ReadableResult(
            str(fields["custom_id"]), prompt, text, answer.error, answer.finish_reason, answer.completion_tokens
        )


def _row(number: int, row: Mapping[str, object], column: str, path: AnyPath) -> ReadableResult:
    if column not in row or ERROR not in row:
        raise InputError(f"{path} has no columns {column!r} and {ERROR!r}: it is no output of a run")
    shown_apart = {column, *_ADDED, *_properties(row[column])}
    others = [name for name in row if name not in shown_apart]
    shown = "\n".join(f"{name}: {_text(row[name])}" for name in others if row[name] not in (None, ""))
    tokens = row.get(COMPLETION_TOKENS)
    return ReadableResult(
        f"row {number}",
        shown or None,
        _text(row[column]) or None,
        _text(row[ERROR]) or None,
        _text(row.get(FINISH_REASON)) or None,
        int(str(tokens)) if tokens not in (None, "") else None,
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
