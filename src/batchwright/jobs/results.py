"""Lines of the output, in the form of OpenAI's batch output files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from batchwright.errors import BatchwrightError
from batchwright.jobs.lines import Line
from batchwright.request import InferenceResponse
from batchwright.wire.responses import Head, completion_body


class LineFailure(msgspec.Struct):
    """Why a line has no response."""

    code: str
    message: str
    param: str | None
    line: int
    """Number of the line in the input, from 1."""


class _HttpResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: dict[str, Any]


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _HttpResponse | None
    error: LineFailure | None


class ResultEncoder:
    """Encodes the results of one job. The `id` of each line holds the job's key and the line's number."""

    def __init__(self, key: str, model_name: str, unix_time: Callable[[], float]) -> None:
        """`key`: what tells this job from others, hexadecimal. `unix_time`: seconds since 1970, for `created`."""
        self._key = key
        self._model_name = model_name
        self._unix_time = unix_time
        self._encoder = msgspec.json.Encoder()

    def failure(self, number: int, custom_id: str, error: BatchwrightError) -> bytes:
        """The line, with its newline, for input line `number` that failed."""
        param = getattr(error, "param", None)
        failure = LineFailure(code=error.code, message=str(error), param=param, line=number)
        return self._encode(number, custom_id, None, failure)

    def success(self, line: Line, custom_id: str, responses: Sequence[InferenceResponse]) -> bytes:
        """The line, with its newline, for `line`, given the response to each of its prompts, in order."""
        head = Head(f"{self._key}-{line.number}", int(self._unix_time()), self._model_name, line.chat, line.params.n)
        body = completion_body(head, responses)
        return self._encode(line.number, custom_id, _HttpResponse(200, f"req_{self._key}_{line.number}", body), None)

    def _encode(
        self, number: int, custom_id: str, response: _HttpResponse | None, failure: LineFailure | None
    ) -> bytes:
        return self._encoder.encode(_OutputLine(output_id(self._key, number), custom_id, response, failure)) + b"\n"


def output_id(key: str, number: int) -> str:
    """The `id` of the output line for input line `number` of the job `key`."""
    return f"batch_req_{key}_{number}"
