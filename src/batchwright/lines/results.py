"""Result lines, in the form of OpenAI's batch output files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from batchwright.errors import DeadlineExceeded
from batchwright.wire.error_bodies import error_body, hides_details, status_of

_encode = msgspec.json.Encoder().encode
_OK = 200
REQUEST_TIMEOUT = "request_timeout"
"""OpenAI's error code of a line whose time was over."""


def output_id(key: str, number: int) -> str:
    """The `id` of the result of line `number` (from 1) of the job or batch `key`."""
    return f"batch_req_{key}_{number}"


def request_id(key: str, number: int) -> str:
    """The id of the call that computes a line, the same at each try."""
    return f"req_{key}_{number}"


def encode_answer(key: str, number: int, custom_id: str, body: Mapping[str, Any]) -> bytes:
    """The result line, without its newline, of a line whose answer is `body`."""
    return _with_response(key, number, custom_id, _OK, body)


def encode_refusal(key: str, number: int, custom_id: str, error: BaseException) -> bytes:
    """The result line of a line that failed with `error`, with the status and the body that it has over HTTP."""
    return _with_response(key, number, custom_id, status_of(error), error_body(error))


def encode_failure(key: str, number: int, custom_id: str, error: Mapping[str, Any]) -> bytes:
    """The result line of a line without an answer. `error` holds at least `code` and `message`."""
    return _encode({"id": output_id(key, number), "custom_id": custom_id, "response": None, "error": error})


def is_timeout(error: BaseException) -> bool:
    """Whether a line failed because its time was over, which is a `REQUEST_TIMEOUT`."""
    return isinstance(error, (TimeoutError, DeadlineExceeded))


def line_error(error: BaseException) -> dict[str, Any]:
    """`code`, `message` and `param` of an error, for the owner of the job, from whom no detail is hidden."""
    if is_timeout(error):
        return {"code": REQUEST_TIMEOUT, "message": str(error), "param": None}
    told = error_body(error)["error"]
    message = str(error) if hides_details(error) else told["message"]
    return {"code": told["code"], "message": message, "param": told["param"]}


def token_count(body: Mapping[str, Any], name: str, detail: str | None = None) -> int:
    """A count in the `usage` of a response, or in its part `detail`; 0 if an endpoint sent none, or nonsense."""
    counts = _part(body, "usage")
    count = (counts if detail is None else _part(counts, detail)).get(name)
    return count if isinstance(count, int) and 0 <= count < 2**53 else 0


def _with_response(key: str, number: int, custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": request_id(key, number), "body": body}
    return _encode({"id": output_id(key, number), "custom_id": custom_id, "response": response, "error": None})


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}
