"""Lines of the output, in the form of OpenAI's batch output files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from batchwright.errors import BatchwrightError
from batchwright.jobs.lines import Line
from batchwright.request import Choice, InferenceResponse, TokenLogprob

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI uses the same."""


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
        body = self._body(line, responses)
        return self._encode(line.number, custom_id, _HttpResponse(200, f"req_{self._key}_{line.number}", body), None)

    def _encode(
        self, number: int, custom_id: str, response: _HttpResponse | None, failure: LineFailure | None
    ) -> bytes:
        return self._encoder.encode(_OutputLine(output_id(self._key, number), custom_id, response, failure)) + b"\n"

    def _body(self, line: Line, responses: Sequence[InferenceResponse]) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion") if line.chat else ("cmpl", "text_completion")
        choices = []
        for position, response in enumerate(responses):
            for choice in response.choices:
                index = position * line.params.n + choice.index
                choices.append(_chat_choice(index, choice) if line.chat else _text_choice(index, choice))
        return {
            "id": f"{prefix}-{self._key}-{line.number}",
            "object": kind,
            "created": int(self._unix_time()),
            "model": self._model_name,
            "choices": choices,
            "usage": _usage(responses),
        }


def output_id(key: str, number: int) -> str:
    """The `id` of the output line for input line `number` of the job `key`."""
    return f"batch_req_{key}_{number}"


def _usage(responses: Sequence[InferenceResponse]) -> dict[str, Any]:
    prompt_tokens = sum(response.usage.prompt_tokens for response in responses)
    completion_tokens = sum(response.usage.completion_tokens for response in responses)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(response.usage.cached_tokens for response in responses)},
    }


def _chat_choice(index: int, choice: Choice) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        content = [
            {
                **_chat_token(entry.token, entry.logprob),
                "top_logprobs": [_chat_token(token, logprob) for _, token, logprob in entry.top],
            }
            for entry in choice.logprobs
        ]
        logprobs = {"content": content, "refusal": None}
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    # A token that holds a part of a character only has no text of its own, so its bytes are not known from it.
    known = "�" not in token
    return {
        "token": token,
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(token.encode()) if known else None,
    }


def _text_choice(index: int, choice: Choice) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else _text_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _text_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    offsets, position = [], 0
    for entry in entries:
        offsets.append(position)
        position += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [max(entry.logprob, _LEAST_LOGPROB) for entry in entries],
        "top_logprobs": [{token: max(logprob, _LEAST_LOGPROB) for _, token, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }
