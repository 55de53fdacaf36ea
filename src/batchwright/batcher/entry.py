"""One request on its way through a batcher, and its answer."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import MISSING, fields, replace
from typing import Any, cast

from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.token_lengths import Measure
from batchwright.errors import BatchwrightError, Cancelled, DeadlineExceeded, GenerationError
from batchwright.policies import Item
from batchwright.request import MAX_DEADLINE, FinishReason, InferenceRequest, InferenceResponse, Usage

_log = logging.getLogger("batchwright.batcher")

_DEFAULTS: dict[str, Any] = {
    each.name: None if each.default is MISSING else each.default for each in fields(InferenceResponse)
}
"""A value for each field of a response, so that setting one does not resize a copy."""
_NO_USAGE = Usage(0, 0)
"""Usage of a response for which none was reported."""
_SOONEST = 1e-6
"""Least seconds that a request is passed on with."""


class Entry(Item, eq=False, kw_only=True):
    """A waiting or running request. It is answered once, by `succeed` or `fail`; later answers are ignored.

    With a `request` the answer is an `InferenceResponse`, even for a failure. Without one it is the bare output, or the
    exception itself.
    """

    future: asyncio.Future[Any]
    prompt: Any
    request: InferenceRequest | None = None
    started: float | None = None
    """When it was dispatched."""
    group: Any = None
    """Batch that computes it. Set and read by the core."""
    tries: int = 0
    """Number of times that it was retried alone after a failure."""

    __repr__ = object.__repr__  # with its fields, prompts would be logged

    @property
    def waits_for_answer(self) -> bool:
        return not self.future.done()

    def handed(self, now: float) -> InferenceRequest | None:
        """Return the request as a model gets it at `now`: with what is left of its deadline."""
        if self.request is None or self.due == math.inf:
            return self.request
        return replace(self.request, deadline=seconds_left(self.due, now))

    def succeed(self, output: Any, now: float, measure: Measure, stats: BatcherStats) -> None:
        """Answer with the model's output. An exception is a failure, and so is a response with an error."""
        if self.future.done():
            return
        if isinstance(output, BaseException):
            self.fail(output, now, stats)
            return
        if self.request is None:
            stats.count_successes((self,), now)
            self.future.set_result(output)
            return
        response = self._response(self.request, output, now, measure)
        stats.generated_tokens += response.tokens_generated
        if response.error is None:
            stats.count_successes((self,), now)
        else:
            stats.count_failure(self)
        self._answer(self.request, response)

    def respond(self, output: Any, now: float, measure: Measure) -> int:
        """Answer a request with the model's output, which is not a failure, and return its tokens."""
        request = cast(InferenceRequest, self.request)
        response = self._response(request, output, now, measure)
        self._answer(request, response)
        return response.tokens_generated

    def fail(self, error: BaseException, now: float, stats: BatcherStats) -> None:
        """Answer with an error; a request's response carries it as a `BatchwrightError`, the original as its cause."""
        if self.future.done():
            return
        stats.count_failure(self)
        self._fail(error, now, "error")

    def expire(self, now: float, stats: BatcherStats, error: DeadlineExceeded | None = None) -> None:
        """Answer that the deadline has passed, or with an `error` that says more. Must be called once, and first."""
        if error is None:
            where = "in the queue" if self.started is None else "in the model"
            error = DeadlineExceeded(f"its deadline of {(self.due - self.arrival) * 1e3:.4g} ms passed {where}")
        stats.count_late(self)
        self._fail(error, now, "error")

    def abandon(self, now: float) -> None:
        """Record that the caller is gone: nothing awaits the answer, but the callback is called."""
        if self.request is not None and self.request.callback is not None:
            error = Cancelled(f"request {self.request.request_id}: cancelled by its caller")
            _tell(self.request, self._failure(self.request, error, now, "cancelled"))

    def _fail(self, error: BaseException, now: float, finish_reason: FinishReason) -> None:
        if self.request is not None:
            self._answer(self.request, self._failure(self.request, _public(error), now, finish_reason))
        elif isinstance(error, StopIteration) or not isinstance(error, Exception):
            # A future cannot carry any of these as they are; some would also end the callers' event loops.
            self.future.set_exception(_public(error))
        else:
            self.future.set_exception(error)

    def _answer(self, request: InferenceRequest, response: InferenceResponse) -> None:
        self.future.set_result(response)
        if request.callback is not None:
            _tell(request, response)

    def _response(self, request: InferenceRequest, output: Any, now: float, measure: Measure) -> InferenceResponse:
        latency_ms, queue_ms = self._times(now)
        if isinstance(output, InferenceResponse):
            usage = output.usage
            if usage == _NO_USAGE:
                usage = measure.usage(self.prompt, self.length, output.tokens_generated)
            return replace(
                output,
                request_id=request.request_id,
                latency_ms=latency_ms,
                queue_ms=queue_ms,
                usage=usage,
                metadata=request.metadata,
            )
        generated = measure.output_tokens(output)
        # Equivalent to calling the class, whose initializer sets each field by a call.
        response = object.__new__(InferenceResponse)
        values = _DEFAULTS.copy()
        values["request_id"] = request.request_id
        values["output"] = output
        values["tokens_generated"] = generated
        values["latency_ms"] = latency_ms
        values["queue_ms"] = queue_ms
        values["usage"] = measure.usage(self.prompt, self.length, generated)
        values["metadata"] = request.metadata
        object.__setattr__(response, "__dict__", values)
        return response

    def _failure(
        self, request: InferenceRequest, error: BatchwrightError, now: float, finish_reason: FinishReason
    ) -> InferenceResponse:
        return failed_response(request, error, finish_reason, *self._times(now))

    def _times(self, now: float) -> tuple[float, float]:
        until = now if self.started is None else self.started
        return (now - self.arrival) * 1e3, (until - self.arrival) * 1e3


def seconds_left(due: float, now: float) -> float | None:
    """Return the deadline of a request that is passed on at `now`, in seconds from then; None if it has none."""
    return None if due == math.inf else min(max(due - now, _SOONEST), MAX_DEADLINE)


def failed_response(
    request: InferenceRequest,
    error: BatchwrightError,
    finish_reason: FinishReason = "error",
    latency_ms: float = 0.0,
    queue_ms: float = 0.0,
) -> InferenceResponse:
    """Return the answer to a request for which nothing was computed."""
    return InferenceResponse(
        request_id=request.request_id,
        output="",
        tokens_generated=0,
        latency_ms=latency_ms,
        queue_ms=queue_ms,
        finish_reason=finish_reason,
        usage=Usage(0, 0),
        error=error,
        metadata=request.metadata,
    )


def _public(error: BaseException) -> BatchwrightError:
    if isinstance(error, BatchwrightError):
        return error
    try:
        reason = f": {error}"
    except Exception:
        # The exception's own fault, which must not cost the caller the answer.
        reason = ""
    public = GenerationError(f"the model failed with {type(error).__name__}{reason}")
    public.__cause__ = error
    return public


def _tell(request: InferenceRequest, response: InferenceResponse) -> None:
    if request.callback is not None:
        try:
            request.callback(response)
        except Exception:
            _log.exception("the callback of request %s raised; its answer is not affected", request.request_id)
