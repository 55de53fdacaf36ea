"""Parsing of the records of an input into lines to compute, or into the reasons why they cannot be computed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from batchwright.constraints import Constraint, constraint_of
from batchwright.errors import InvalidRequest
from batchwright.jobs.sources import InputFormat, Record
from batchwright.jobs.templates import Templates
from batchwright.lines.batch_line import check_batch_line, check_custom_id, check_no_stream, decode_line
from batchwright.request import Prompt, SamplingParams
from batchwright.wire.answer_forms import form_overrides, named_in_body
from batchwright.wire.bounds import require_sizes
from batchwright.wire.classifying import read_classifying, sent_inputs
from batchwright.wire.dialects import OPENAI, Dialect, require_endpoint
from batchwright.wire.fields import known_fields
from batchwright.wire.requests import (
    ALIASES,
    CHAT_URL,
    CLASSIFIER_URLS,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    ENCODER_URLS,
    RESPONSES_URL,
    filled,
    read_embeddings,
    read_generation,
    texts_of_response,
    texts_of_sent,
)
from batchwright.wire.text_responses import chat_of_response, form_of_response, named_in_response


class _Url(msgspec.Struct):
    url: object = None
    body: msgspec.Raw = msgspec.Raw()


_decode_url = msgspec.json.Decoder(_Url).decode
ID_FIELDS = ("custom_id", "id")

_BATCH_FIELDS = frozenset({"method", "url"})
_PROMPT_FIELDS = frozenset({"prompt", "messages"})
_OWN_FIELDS = _PROMPT_FIELDS | {"model"}


@dataclass(frozen=True, slots=True)
class Line:
    """The request in one record."""

    number: int
    custom_id: str | None
    """Id given in the line; None if there is none, so that it gets its default."""
    endpoint: str
    body: Mapping[str, Any]
    """Body of the request, which is only checked when it is computed."""


def check_body(
    endpoint: str, body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any] | None
) -> Sequence[Prompt]:
    """The prompts in a body for a model in this process, after checking all of it; arguments as in `Call`.

    Raises `InvalidRequest`.
    """
    if endpoint == RESPONSES_URL:
        chat = chat_of_response(body)
        with named_in_response():
            return read_generation(chat, chat=True, defaults=defaults).prompts
    if endpoint == EMBEDDINGS_URL:
        return read_embeddings(body).inputs
    if endpoint in CLASSIFIER_URLS:
        inputs = read_classifying(endpoint, body).inputs
        return [" ".join(each) if isinstance(each, tuple) else each for each in inputs]
    return read_generation(body, chat=endpoint == CHAT_URL, defaults=defaults).prompts


def check_form(endpoint: str, body: Mapping[str, Any]) -> None:
    """Check that models in this process can produce the form that a valid body asks for.

    Raises `InvalidRequest`, with the keyword of a schema that they do not support, and its place.
    """
    if endpoint == RESPONSES_URL:
        with named_in_response():
            check_form(CHAT_URL, {"response_format": form_of_response(body)})
        return
    constraint = _constraint(body)
    if constraint is not None and (refusal := _refusal(constraint)) is not None:
        raise named_in_body(InvalidRequest(f"{constraint.kind}: {refusal}", param=constraint.kind), body)


def asks_for_form(endpoint: str, body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any] | None) -> bool:
    """Return whether a valid body asks for an answer of some form, tools left aside.

    Arguments as in `Call`; `defaults` that are a mapping, which are for an endpoint elsewhere, are ignored.
    """
    if isinstance(defaults, SamplingParams) and defaults.is_constrained:
        return True
    if endpoint == RESPONSES_URL:
        return _constraint({"response_format": form_of_response(body)}) is not None
    return _constraint(body) is not None


def _constraint(body: Mapping[str, Any]) -> Constraint | None:
    fields = form_overrides(body)
    return constraint_of(**fields) if fields else None


def _refusal(constraint: Constraint) -> str | None:
    from batchwright.engine.grammars import refusal_of

    try:
        return refusal_of(constraint)
    except ModuleNotFoundError:
        return None  # whatever computes asks for the extra


def check_sent_body(
    dialect: Dialect, endpoint: str, body: Mapping[str, Any], defaults: SamplingParams | Mapping[str, Any] | None
) -> Sequence[Prompt]:
    """The prompts in a body for an endpoint elsewhere, after the checks that can be made here.

    Raises `InvalidRequest`.
    """
    require_endpoint(dialect, endpoint)
    if endpoint == RESPONSES_URL:
        return texts_of_response(body)
    if endpoint in CLASSIFIER_URLS:
        require_sizes(body)
        return sent_inputs(endpoint, body)
    if dialect.name == OPENAI.name:
        try:
            return check_body(endpoint, body, defaults)
        except InvalidRequest as error:
            if not error.code.startswith("unsupported"):
                raise
            return texts_of_sent(body)  # an endpoint may well support what models here do not
    require_sizes(body)
    sent = dialect.body(endpoint, filled(endpoint, body, defaults))
    return [[*([{"content": sent["system"]}] if "system" in sent else []), *sent["messages"]]]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that is not a valid line."""

    number: int
    custom_id: str | None
    """Id of the line; None if it has none that can be read."""
    error: InvalidRequest


@dataclass(frozen=True, slots=True)
class LineParser:
    """A parser of the records of one format."""

    input_format: InputFormat
    templates: Templates | None = None
    """Templates that make a request from a row; None unless the input is a table."""
    id_column: str | None = None
    """Column with the ids of rows; None: rows have none of their own."""
    chat: bool = False
    """Whether a prompt that is plain text becomes the user message of a chat."""
    system: str | None = None
    """System message of such a chat."""
    max_line_bytes: int = 2**20

    def parse(self, record: Record) -> Line | BadLine:
        """The line of a record. Raises nothing."""
        content = record.content
        custom_id: str | None = None
        try:
            if isinstance(content, InvalidRequest):
                raise content
            if isinstance(content, Mapping):
                # The id first: it names the line even if the template cannot be filled in.
                if self.id_column is not None and content.get(self.id_column) not in (None, ""):
                    custom_id = _own_id(self.id_column, content[self.id_column])
                return self._prompt_line(record.number, custom_id, self._rendered(content))
            if self.input_format == "txt":
                return self._prompt_line(record.number, None, {"prompt": content.decode()})
            fields = decode_line(content)
            # Other lines may have fields of their own called method or url.
            if "body" in fields or (_BATCH_FIELDS & fields.keys() and not _PROMPT_FIELDS & fields.keys()):
                custom_id = _readable_id(fields.get("custom_id"))
                line = check_batch_line(fields)
                return Line(record.number, line.custom_id, line.endpoint, line.body)
            given = next((name for name in ID_FIELDS if fields.get(name) is not None), None)
            custom_id = None if given is None else _own_id(given, fields[given])
            return self._prompt_line(record.number, custom_id, known_fields(fields, _OWN_FIELDS))
        except UnicodeDecodeError as error:
            message = f"the line is not UTF-8 (byte {error.start + 1})"
            return BadLine(record.number, None, InvalidRequest(message, code="invalid_encoding"))
        except InvalidRequest as error:
            return BadLine(record.number, custom_id, error)

    def endpoint_of(self, record: Record) -> str:
        """The endpoint of a record, found without checking the record."""
        if isinstance(record.content, bytes) and self.input_format in ("jsonl", "json"):
            with suppress(ValueError):
                line = _decode_url(record.content)
                url = ALIASES.get(line.url, line.url) if isinstance(line.url, str) else None
                if url in ENCODER_URLS and bytes(line.body):
                    return url
        return COMPLETION_URL

    def _rendered(self, row: Mapping[str, object]) -> dict[str, Any]:
        if self.templates is None:
            raise InvalidRequest("a row of a table needs a prompt template")
        fields = self.templates.render(row)
        prompt = fields.get("prompt")
        text = prompt if isinstance(prompt, str) else json.dumps(fields, ensure_ascii=False)
        if len(text.encode(errors="replace")) > self.max_line_bytes:
            raise InvalidRequest(
                f"the prompt has more than {self.max_line_bytes:,} bytes: shorten it, or raise --max-line-bytes",
                code="line_too_long",
            )
        return fields

    def _prompt_line(self, number: int, custom_id: str | None, body: dict[str, Any]) -> Line:
        """A line that is not an OpenAI batch line, whose fields are those of the body."""
        given = _PROMPT_FIELDS & body.keys()
        if len(given) == 2:
            raise InvalidRequest("the line has both prompt and messages: give one", param="prompt")
        if not given:
            raise InvalidRequest(
                "the line has no prompt, no messages and no body: give one", code="missing_required_parameter"
            )
        check_no_stream("stream", body.get("stream"))
        if self.chat and isinstance(body.get("prompt"), str):
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            body["messages"] = [*system, {"role": "user", "content": body.pop("prompt")}]
        return Line(number, custom_id, CHAT_URL if "messages" in body else COMPLETION_URL, body)


def _readable_id(custom_id: object) -> str | None:
    """The id of a line that may be bad; None if it cannot be an id in the output."""
    with suppress(InvalidRequest):
        if isinstance(custom_id, str):
            check_custom_id("custom_id", custom_id)
            return custom_id
    return None


def _own_id(name: str, value: object) -> str:
    """The id in the field `name` of a line that is not a batch line, which may be a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a text or a whole number", param=name, code="invalid_type")
    check_custom_id(name, value)
    return value
