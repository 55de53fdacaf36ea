"""Lines of OpenAI's batch files: reading them, checking each before it is computed, and the lines of results.

Only the frame of a line is checked here. Its sampling parameters, messages and so on are checked where it is computed.
Codes and messages of errors are OpenAI's, and the same for all sources of lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from batchwright.errors import DeadlineExceeded, InvalidRequest, shown
from batchwright.wire.bounds import MAX_MODEL
from batchwright.wire.error_bodies import error_body, hides_details, status_of
from batchwright.wire.requests import (
    ALIASES,
    CHAT_URL,
    CLASSIFY_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
)

MAX_CUSTOM_ID = 512
"""Most characters of a custom id."""

ENDPOINTS = (CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, RESPONSES_URL, RERANK_URL, SCORE_URL, CLASSIFY_URL)
REQUEST_TIMEOUT = "request_timeout"
"""OpenAI's error code for a line whose time is up."""
_OK = 200
_NAMES_OF_RESPONSES = {
    "prompt_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
    "prompt_tokens_details": "input_tokens_details",
    "completion_tokens_details": "output_tokens_details",
}
_encode = msgspec.json.Encoder().encode
_BOM = b"\xef\xbb\xbf"
_PIECE = 2**20
"""Bytes of a line over the limit that are read and discarded at a time."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line whose frame is valid."""

    custom_id: str
    endpoint: str
    """One of `ENDPOINTS`; the `url` of the line may be another name of it (`ALIASES`)."""
    body: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        """The model that the body names; None if it names none, so that the default model is used."""
        return self.body.get("model")


def split_lines(file: IO[bytes], limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Number (from 1), offset in bytes, and content of each line of `file`, which is read from its beginning.

    The content lacks the end of the line, and a byte order mark at the start of the file, although the offset counts
    it. It is None for a line of more than `limit` bytes, which is never held whole.
    """
    # Room for a byte order mark and both bytes of a line end: a line that fills it without ending is over the limit.
    room = limit + len(_BOM) + 2
    number = offset = 0
    while read := file.readline(room):
        number += 1
        start = offset
        offset += len(read)
        whole = len(read) < room or read.endswith(b"\n")
        if number == 1 and read.startswith(_BOM):
            read, start = read[len(_BOM) :], len(_BOM)
        content = read.rstrip(b"\r\n")
        yield number, start, content if whole and len(content) <= limit else None
        while not whole:
            read = file.readline(_PIECE)
            offset += len(read)
            whole = not read or read.endswith(b"\n")


def decode_line(content: bytes) -> dict[str, Any]:
    """The JSON object in one line (without its newline). Raises only `InvalidRequest`, whatever the bytes."""
    try:
        line = msgspec.json.decode(content.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        reason: object = error
        try:
            content.decode()
        except UnicodeDecodeError as wrong:
            reason = f"byte {wrong.start + 1} is not UTF-8"
        raise InvalidRequest(
            f"This line is not parseable as valid JSON: {reason}.", code="invalid_json_line"
        ) from error
    if not isinstance(line, dict):
        raise InvalidRequest(f"This line is a JSON {_json_type(line)}: it must be an object.", code="invalid_json_line")
    return line


def check_batch_line(line: Mapping[str, Any]) -> BatchLine:
    """Check the frame of a decoded line. Raises `InvalidRequest`; uniqueness of its custom_id is not checked here."""
    for name in ("custom_id", "method", "url", "body"):
        if line.get(name) is None:
            raise InvalidRequest(
                f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
            )
    custom_id, method, url, body = line["custom_id"], line["method"], line["url"], line["body"]
    if not isinstance(custom_id, str):
        raise _wrong_type("custom_id", custom_id, "text")
    check_custom_id("custom_id", custom_id)
    if method != "POST":
        raise InvalidRequest(f"method is {shown(method)}: it must be 'POST'.", param="method", code="invalid_method")
    url = ALIASES.get(url, url) if isinstance(url, str) else url
    if url not in ENDPOINTS:
        raise InvalidRequest(
            f"url is {shown(url)}: it must be one of {', '.join(ENDPOINTS)}.", param="url", code="invalid_url"
        )
    if not isinstance(body, dict):
        raise _wrong_type("body", body, "an object")
    check_no_stream("body.stream", body.get("stream"))
    if (model := body.get("model")) is not None:
        _check_model(model)
    return BatchLine(custom_id, url, body)


def check_custom_id(name: str, custom_id: str) -> None:
    """Raise `InvalidRequest` for an id, given as the field `name`, that is too long, is empty, or contains a NUL."""
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID or "\0" in custom_id:
        raise InvalidRequest(
            f"{name} has {len(custom_id)} characters: it must have 1 to {MAX_CUSTOM_ID}, and none of them NUL.",
            param=name,
            code="invalid_custom_id",
        )


def check_no_stream(name: str, stream: object) -> None:
    """Raise `InvalidRequest` for a line that asks for a stream in the field `name`."""
    if stream not in (None, False):
        raise InvalidRequest("stream is not possible in a batch: leave it out.", param=name, code="invalid_request")


def line_too_long(limit: int) -> InvalidRequest:
    """The error of a line of more than `limit` bytes."""
    return InvalidRequest(
        f"This line has more than {limit:,} bytes, the limit (max_line_bytes): shorten it, or raise the limit.",
        code="line_too_long",
    )


def _check_model(model: object) -> None:
    if isinstance(model, str) and len(model) > MAX_MODEL:
        raise InvalidRequest(
            f"model has {len(model):,} characters, the most is {MAX_MODEL}.",
            param="body.model",
            code="string_above_max_length",
        )
    if not isinstance(model, str) or not model or "\0" in model:
        raise InvalidRequest(
            f"model is {shown(model)}: it must be the name of a model.", param="body.model", code="invalid_type"
        )


def _wrong_type(name: str, value: object, needed: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is a JSON {_json_type(value)}: it must be {needed}.", param=name, code="invalid_type"
    )


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


# Result lines.


def output_id(key: str, number: int) -> str:
    """The `id` of the result of line `number` (from 1) of the job or batch `key`."""
    return f"batch_req_{key}_{number}"


def request_id(key: str, number: int) -> str:
    """The id of the call that computes a line, the same for each try."""
    return f"{request_prefix(key)}{number}"


def request_prefix(key: str) -> str:
    """The beginning of the ids of the calls of a job."""
    return f"req_{key}_"


def encode_answer(key: str, number: int, custom_id: str, body: Mapping[str, Any]) -> bytes:
    """The result line, without its newline, of a line whose answer is `body`."""
    return _with_response(key, number, custom_id, _OK, body)


def deduplicated(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer for a line that was not computed because an identical one was: its usage says so."""
    usage = answer.get("usage")
    marked = {**(usage if isinstance(usage, dict) else {}), "deduplicated": True}
    if "cost" in marked:
        marked["cost"] = 0.0
    return {**answer, "usage": marked}


def encode_refusal(key: str, number: int, custom_id: str, error: BaseException) -> bytes:
    """The result line of a line that failed with `error`, with the status and the body that it has over HTTP."""
    return _with_response(key, number, custom_id, status_of(error), error_body(error))


def encode_failure(key: str, number: int, custom_id: str, error: Mapping[str, Any]) -> bytes:
    """The result line of a line without an answer. `error` holds at least `code` and `message`."""
    return _encode({"id": output_id(key, number), "custom_id": custom_id, "response": None, "error": error})


def is_timeout(error: BaseException) -> bool:
    """Whether a line failed because its time was up, which is a `REQUEST_TIMEOUT`."""
    return isinstance(error, (TimeoutError, DeadlineExceeded))


def line_error(error: BaseException) -> dict[str, Any]:
    """`code`, `message` and `param` of an error, for the owner of the job, from whom no detail is hidden."""
    if is_timeout(error):
        return {"code": REQUEST_TIMEOUT, "message": str(error), "param": None}
    body = error_body(error)["error"]
    message = str(error) if hides_details(error) else body["message"]
    return {"code": body["code"], "message": message, "param": body["param"]}


def token_count(body: Mapping[str, Any], name: str, detail: str | None = None) -> int:
    """A count in the `usage` of a response, or in its part `detail`; 0 if an endpoint sent none, or an invalid one.

    Names are those of chats. Answers of `/v1/responses` call prompts input, and completions output.
    """
    counts = _part(body, "usage")
    if "prompt_tokens" not in counts and name == "prompt_tokens" and "input_tokens" not in counts:
        name = "total_tokens"  # all that Jina states of what it ranks
    elif "input_tokens" in counts and "prompt_tokens" not in counts:
        name, detail = _NAMES_OF_RESPONSES.get(name, name), detail and _NAMES_OF_RESPONSES.get(detail, detail)
    count = (counts if detail is None else _part(counts, detail)).get(name)
    return count if isinstance(count, int) and 0 <= count < 2**53 else 0


def _with_response(key: str, number: int, custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": request_id(key, number), "body": body}
    return _encode({"id": output_id(key, number), "custom_id": custom_id, "response": response, "error": None})


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}
