"""Lines of a batch as people read them: prompts beside answers, and errors by their codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from batchwright.errors import BatchwrightError
from batchwright.jobs.answers import read_answer
from batchwright.lines.batch_line import decode_line
from batchwright.store.records import LineState, StoredLine
from batchwright.wire.api_model import ApiModel

_MOST = 20_000
"""Most characters of a text."""


class LineError(ApiModel):
    """The error of a line that failed."""

    code: str | None
    message: str


class ReadableLine(ApiModel):
    """One line of a batch."""

    line: int
    """Number of the line in the input, from 1."""
    custom_id: str
    state: LineState
    prompt: str | None
    """The prompt, or the messages of a chat; null when the input file is gone."""
    answer: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    error: LineError | None

    def has(self, text: str) -> bool:
        """Return whether it contains `text`, whatever the case."""
        error = None if self.error is None else f"{self.error.code} {self.error.message}"
        sought = text.casefold()
        return any(sought in each.casefold() for each in (self.custom_id, self.prompt, self.answer, error) if each)


class ReadableLines(ApiModel):
    """A page of lines of a batch, in the order of the input."""

    object: str = "list"
    data: list[ReadableLine]
    next_after: int | None
    """Value of `after` for the next page; null after the last line."""


class ErrorGroup(ApiModel):
    """The failed lines of a batch with one code."""

    code: str
    count: int
    example: ReadableLine
    """The first of them."""


class ErrorGroups(ApiModel):
    """The failed lines of a batch by code, the most frequent first."""

    object: str = "list"
    data: list[ErrorGroup]
    counted: int
    """Failed lines that were looked at."""
    has_more: bool
    """Whether there are more failed lines, which were not looked at."""


def readable(line: StoredLine, content: bytes | None) -> ReadableLine:
    """Return a line with its text in the input, None where that is gone."""
    error = _error_of(line.output) if line.output is not None and line.state == "failed" else None
    answer = None if line.output is None or error is not None else read_answer(line.output)[1]
    return ReadableLine(
        line=line.number,
        custom_id=line.custom_id,
        state=line.state,
        prompt=None if content is None else _prompt_of(content),
        answer=None if answer is None else _text(answer.answer),
        finish_reason=None if answer is None else answer.finish_reason,
        prompt_tokens=None if answer is None else answer.prompt_tokens,
        completion_tokens=None if answer is None else answer.completion_tokens,
        error=error,
    )


def error_code(line: StoredLine) -> str:
    """Return the code of the error of a failed line."""
    error = None if line.output is None else _error_of(line.output)
    return (error.code if error is not None else None) or "unknown"


def _error_of(output: bytes) -> LineError | None:
    result: Mapping[str, Any] = msgspec.json.decode(output)
    error = result.get("error")
    if error is None:
        body = (result.get("response") or {}).get("body")
        error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    code = error.get("code") or error.get("type")
    return LineError(code=None if code is None else str(code), message=_cut(str(error.get("message") or "no message")))


def _prompt_of(content: bytes) -> str | None:
    try:
        body = decode_line(content)["body"]
    except (BatchwrightError, KeyError):
        return None
    messages = body.get("messages")
    if not isinstance(messages, list):
        return _text(body.get("prompt", body.get("input")))
    found = [message for message in messages if isinstance(message, dict)]
    if len(found) == 1:
        return _text(found[0].get("content"))
    return _cut("\n\n".join(f"{message.get('role')}: {_text(message.get('content')) or ''}" for message in found))


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else _cut(value)
    return _cut(msgspec.json.encode(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"
