"""Lines of output and error files, and the token counts in their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.errors import InputBroken
from batchwright.lines.batch_line import (
    REQUEST_TIMEOUT,
    encode_answer,
    encode_failure,
    encode_refusal,
    is_timeout,
    token_count,
)
from batchwright.lines.line_executor import Outcome
from batchwright.lines.line_retries import nobody_computes
from batchwright.store.records import ClaimedLine, Ending, LineResult, StoredLine, TokenUsage

UNFINISHED: dict[Ending, tuple[str, str]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This request was not executed because the batch was cancelled."),
}
"""Code and message of a line that has no result when its batch ends."""


def key_of(batch_id: str) -> str:
    """Return the part of result ids that identifies a batch."""
    return batch_id.removeprefix("batch_")


def result_of(line: ClaimedLine, outcome: Outcome) -> LineResult | None:
    """Return the result of a line with this outcome; None: it is to be computed again, here or elsewhere."""
    if outcome is None or (isinstance(outcome, Exception) and nobody_computes(outcome)):
        return None
    place = key_of(line.batch_id), line.number, line.custom_id
    if isinstance(outcome, dict):
        answer = encode_answer(*place, outcome)
        return LineResult(line.batch_id, line.number, line.attempt, True, answer, usage_of(outcome))
    if isinstance(outcome, InputBroken):
        return _failed(line, outcome.code, str(outcome))
    if is_timeout(outcome):
        return _failed(line, REQUEST_TIMEOUT, str(outcome))
    return LineResult(line.batch_id, line.number, line.attempt, False, encode_refusal(*place, outcome))


def crashed(line: ClaimedLine) -> LineResult:
    """Return the result of a line whose process died each time that it was computed."""
    return _failed(
        line,
        "crashed",
        f"The process that computed this request died {line.crashes} times, the last time with no other request of a "
        "batch in progress; it is not tried again. The log of the system says why it died. If the request needs too "
        "much memory, make it smaller or give the process more; then retry the batch.",
    )


def error_line(batch_id: str, line: StoredLine, ending: Ending) -> bytes:
    """Return a line of the error file: the result of `line`, or else the error that the end of its batch causes."""
    if line.output is not None:
        return line.output
    code, message = UNFINISHED[ending]
    return encode_failure(key_of(batch_id), line.number, line.custom_id, {"code": code, "message": message})


def usage_of(body: Mapping[str, Any]) -> TokenUsage:
    """Return the token counts in the body of a response."""
    return TokenUsage(
        input_tokens=token_count(body, "prompt_tokens"),
        cached_tokens=token_count(body, "cached_tokens", "prompt_tokens_details"),
        output_tokens=token_count(body, "completion_tokens"),
        reasoning_tokens=token_count(body, "reasoning_tokens", "completion_tokens_details"),
    )


def _failed(line: ClaimedLine, code: str, message: str) -> LineResult:
    """Return the result of a line that has no response."""
    output = encode_failure(key_of(line.batch_id), line.number, line.custom_id, {"code": code, "message": message})
    return LineResult(line.batch_id, line.number, line.attempt, False, output)
