"""Lines of output and error files, and the token counts in the bodies that they carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from batchwright.store.records import ClaimedLine, Ending, LineResult, TokenUsage
from batchwright.wire.error_bodies import error_body, status_of

_encode = msgspec.json.Encoder().encode
_OK = 200
UNFINISHED: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}
"""Code and message of a line that the end of its batch left without a result."""


def request_id(batch_id: str, number: int) -> str:
    """Of the call that computes a line; the same whenever it is computed."""
    return f"req_{batch_id.removeprefix('batch_')}_{number}"


def succeeded(line: ClaimedLine, body: Mapping[str, Any]) -> LineResult:
    """The result of a line whose answer is `body`."""
    return _result(line, usage_of(body), _OK, body)


def refused(line: ClaimedLine, error: BaseException) -> LineResult:
    """The result of a line that failed with `error`: with the status and the body that it has over HTTP."""
    return _result(line, TokenUsage(), status_of(error), error_body(error))


def broken(line: ClaimedLine, code: str, message: str) -> LineResult:
    """The result of a line that got no answer at all."""
    output = _encode(_line(line.batch_id, line.number, line.custom_id, None, {"code": code, "message": message}))
    return LineResult(line.batch_id, line.number, line.attempt, False, output)


def crashed(line: ClaimedLine) -> LineResult:
    """The result of a line that ended the process each time that it was computed."""
    return broken(
        line,
        "crashed",
        f"The process that computed this request died {line.crashes} times, the last time with no other request of a "
        "batch in work; it is not tried again. The log of the system says why it died. If the request needs too much "
        "memory, make it smaller or give the process more; then retry the batch.",
    )


def unfinished(batch_id: str, number: int, custom_id: str, ending: Ending) -> bytes:
    """The line of the error file for a line that the end of its batch left without a result."""
    code, message = UNFINISHED[ending]
    return _encode(_line(batch_id, number, custom_id, None, {"code": code, "message": message}))


def usage_of(body: Mapping[str, Any]) -> TokenUsage:
    """The token counts in the body of a response; zeros where an endpoint elsewhere sent none, or nonsense."""
    usage = _part(body, "usage")
    return TokenUsage(
        input_tokens=_count(usage, "prompt_tokens"),
        cached_tokens=_count(_part(usage, "prompt_tokens_details"), "cached_tokens"),
        output_tokens=_count(usage, "completion_tokens"),
        reasoning_tokens=_count(_part(usage, "completion_tokens_details"), "reasoning_tokens"),
    )


def _result(line: ClaimedLine, usage: TokenUsage, status: int, body: Mapping[str, Any]) -> LineResult:
    response = {"status_code": status, "request_id": request_id(line.batch_id, line.number), "body": body}
    output = _encode(_line(line.batch_id, line.number, line.custom_id, response, None))
    return LineResult(line.batch_id, line.number, line.attempt, status == _OK, output, usage)


def _line(
    batch_id: str,
    number: int,
    custom_id: str,
    response: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{batch_id.removeprefix('batch_')}_{number}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = values.get(name)
    return part if isinstance(part, dict) else {}


def _count(values: Mapping[str, Any], name: str) -> int:
    count = values.get(name)
    return count if isinstance(count, int) and 0 <= count < 2**53 else 0
