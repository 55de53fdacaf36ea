"""Records of an input as lines of work, or as the reasons why they cannot be. No record raises."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from batchwright.errors import InvalidRequest
from batchwright.jobs.sources import InputFormat, Record
from batchwright.jobs.template import PromptTemplate
from batchwright.lines.batch_line import check_batch_line, check_custom_id, decode_line
from batchwright.wire.fields import known_fields
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL


class _Url(msgspec.Struct):
    url: object = None


_decode_url = msgspec.json.Decoder(_Url).decode
ID_FIELDS = ("custom_id", "id")

_BATCH_FIELDS = frozenset({"method", "url"})
_PROMPT_FIELDS = frozenset({"prompt", "messages"})
_OWN_FIELDS = _PROMPT_FIELDS | {"model"}


@dataclass(frozen=True, slots=True)
class Line:
    """The request of one record."""

    number: int
    custom_id: str | None
    """Id of the line; None: it has none, and gets its default."""
    endpoint: str
    body: Mapping[str, Any]
    """Body of the request, which is checked by the inference."""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that cannot be computed, with the reason."""

    number: int
    custom_id: str | None
    """Id of the record; None where it has none that can be read."""
    error: InvalidRequest


@dataclass(frozen=True, slots=True)
class LineParser:
    """Reader of the records of one format."""

    input_format: InputFormat
    template: PromptTemplate | None = None
    """Template of the prompt; needed for tables."""
    chat: bool = False
    """Whether a prompt that is plain text becomes the user message of a chat."""
    system: str | None = None
    """System message of such a chat."""
    max_line_bytes: int = 2**20

    def parse(self, record: Record) -> Line | BadLine:
        content = record.content
        custom_id: str | None = None
        try:
            if isinstance(content, InvalidRequest):
                raise content
            if isinstance(content, Mapping):
                # The id first: it names the line even when the template cannot be filled in.
                custom_id = _own_id({name: content[name] for name in ID_FIELDS if content.get(name, "") != ""})
                return self._prompt_line(record.number, custom_id, {"prompt": self._rendered(content)})
            if self.input_format == "txt":
                return self._prompt_line(record.number, None, {"prompt": _decoded(content)})
            fields = decode_line(content)
            if _is_batch_line(fields):
                custom_id = _readable_id(fields.get("custom_id"))
                line = check_batch_line(fields)
                return Line(record.number, line.custom_id, line.endpoint, line.body)
            custom_id = _own_id(fields)
            return self._prompt_line(record.number, custom_id, known_fields(fields, _OWN_FIELDS))
        except InvalidRequest as error:
            return BadLine(record.number, custom_id, error)

    def endpoint_of(self, record: Record) -> str:
        """Return the endpoint of a record, without checking it."""
        if isinstance(record.content, bytes) and self.input_format == "jsonl":
            with suppress(ValueError):
                if _decode_url(record.content).url == EMBEDDINGS_URL:
                    return EMBEDDINGS_URL
        return COMPLETION_URL

    def _rendered(self, row: Mapping[str, object]) -> str:
        if self.template is None:
            raise InvalidRequest("a row of a table needs a prompt template")
        prompt = self.template.render(row)
        if len(prompt.encode()) > self.max_line_bytes:
            raise InvalidRequest(
                f"the prompt has more than {self.max_line_bytes:,} bytes: shorten it, or raise --max-line-bytes",
                code="line_too_long",
            )
        return prompt

    def _prompt_line(self, number: int, custom_id: str | None, body: dict[str, Any]) -> Line:
        """Return a line that is no OpenAI batch line: its fields are those of the body."""
        given = _PROMPT_FIELDS & body.keys()
        if len(given) == 2:
            raise InvalidRequest("the line has both prompt and messages: give one", param="prompt")
        if not given:
            raise InvalidRequest(
                "the line has no prompt, no messages and no body: give one", code="missing_required_parameter"
            )
        if self.chat and isinstance(body.get("prompt"), str):
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            body["messages"] = [*system, {"role": "user", "content": body.pop("prompt")}]
        return Line(number, custom_id, CHAT_URL if "messages" in body else COMPLETION_URL, body)


def _is_batch_line(fields: Mapping[str, object]) -> bool:
    """Return whether a record has the form of OpenAI's: other lines may have columns called method or url."""
    return "body" in fields or bool(_BATCH_FIELDS & fields.keys() and not _PROMPT_FIELDS & fields.keys())


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the line is not UTF-8 (byte {error.start + 1})", code="invalid_encoding") from error


def _readable_id(custom_id: object) -> str | None:
    """Return the id of a line that may be bad, if it can stand as one in the output."""
    try:
        check_custom_id("custom_id", custom_id if isinstance(custom_id, str) else "")
    except InvalidRequest:
        return None
    return custom_id if isinstance(custom_id, str) else None


def _own_id(fields: Mapping[str, object]) -> str | None:
    """Return the id of a line that is no batch line, which may be a whole number."""
    for name in ID_FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} must be a text or a whole number", param=name, code="invalid_type")
        check_custom_id(name, value)
        return value
    return None
