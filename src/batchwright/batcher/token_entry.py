"""One request that grows token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import msgspec

from batchwright.batcher.batcher_stats import ContinuousStats
from batchwright.batcher.entry import Entry
from batchwright.batcher.token_lengths import Measure
from batchwright.errors import BatchwrightError, DeadlineExceeded
from batchwright.request import FinishReason, InferenceRequest, InferenceResponse, Usage
from batchwright.stop_strings import StopStrings

Listener: TypeAlias = Callable[[str | InferenceResponse], None]
"""Callback for each piece of text and finally the response, in the event loop of the batcher. It must not raise.

An empty piece means that the request has left its slot before its answer is certain.
"""


class TokenEntry(Entry, eq=False, kw_only=True):
    """A prompt and the tokens that the model has added to it. The answer contains the text even after a failure."""

    most: int
    """Maximum number of generated tokens."""
    measure: Measure
    listener: Listener | None = None
    tokens: list[str] = msgspec.field(default_factory=list)
    """All tokens so far, from which the model continues."""
    raw: str = ""
    """The text of the tokens."""
    generated: int = 0
    """Number of generated tokens."""
    timer: asyncio.TimerHandle | None = None
    """Timer of its deadline, set by the core."""
    _stops: StopStrings | None = None
    _given: str = ""
    """Text that has become certain; used only if stop strings make it differ from `raw`."""
    _first_at: float | None = None
    _last_at: float = 0.0

    def __post_init__(self) -> None:
        if self.request is not None and self.request.stop:
            self._stops = StopStrings(self.request.stop)
        self._last_at = self.arrival

    @property
    def is_heard(self) -> bool:
        """Whether a listener wants its text as it comes."""
        return self.listener is not None

    def accept(self, token: str, now: float, stats: ContinuousStats) -> FinishReason | None:
        """Take the next token (empty: the end); return why the request has ended with it, or None."""
        if not token:
            self._give(self._held())
            return "stop"
        self.generated += 1
        self._last_at = now
        if self._first_at is None:
            self._first_at = now
            stats.ttft_ms.add((now - self.arrival) * 1e3)
        self.tokens.append(token)
        self.raw += token
        piece, stopped = token, False
        if self._stops is not None and self.request is not None:
            piece, stopped = self._stops.push(token, armed=self.generated >= self.request.min_tokens)
        ended: FinishReason | None = None
        if stopped:
            ended = "stop"
        elif self.generated >= self.most:
            ended = "length"
            piece += self._held()
        self._give(piece)
        return ended

    def hear(self, piece: str) -> None:
        """Pass a piece of text on to the listener, if there is one."""
        if piece and self.listener is not None:
            self.listener(piece)

    def leave_slot(self) -> None:
        """Inform the listener that another request may have its slot, although it is not answered yet."""
        if self.listener is not None:
            self.listener("")

    def finish(self, reason: FinishReason, now: float, stats: ContinuousStats) -> None:
        """Answer with the whole text."""
        if self._first_at is not None and self.generated > 1:
            stats.tpot_ms.add((self._last_at - self._first_at) / (self.generated - 1) * 1e3)
        self.succeed(reason, now, self.measure, stats)

    def refuse(self, error: BatchwrightError, now: float, stats: ContinuousStats) -> None:
        """Raise `error` for the caller: the request, which was counted as taken, can never be computed."""
        if self.request is None or self.future.done():
            return
        stats.count_failure(self)
        self.future.set_exception(error)
        if self.listener is not None:
            self.listener(self._failure(self.request, error, now, "error"))

    def conclude(self, response: InferenceResponse, now: float, stats: ContinuousStats) -> None:
        """Answer with the response of an engine, which has its own counts and measurements."""
        if self.request is None or self.future.done():
            return
        if response.error is not None:
            if isinstance(response.error, DeadlineExceeded):
                stats.count_late(self)
            else:
                stats.count_failure(self)
            self._answer(self.request, self._response(self.request, response, now, self.measure))
            return
        stats.queue_ms.add(response.queue_ms)
        stats.tokens += response.usage.prompt_tokens
        stats.cells += response.usage.prompt_tokens
        if response.ttft_ms is not None:
            stats.ttft_ms.add(response.ttft_ms)
            if response.tokens_generated > 1:
                stats.tpot_ms.add((response.latency_ms - response.ttft_ms) / (response.tokens_generated - 1))
        self.succeed(response, now, self.measure, stats)

    def _give(self, piece: str) -> None:
        if self._stops is not None:
            self._given += piece
        self.hear(piece)

    def _held(self) -> str:
        return "" if self._stops is None else self._stops.flush()

    def _answer(self, request: InferenceRequest, response: InferenceResponse) -> None:
        super()._answer(request, response)
        if self.listener is not None:
            self.listener(response)

    def _response(
        self, request: InferenceRequest, output: FinishReason | InferenceResponse, now: float, measure: Measure
    ) -> InferenceResponse:
        if isinstance(output, InferenceResponse):
            return replace(output, latency_ms=(now - self.arrival) * 1e3)
        return self._full(request, now, output, None)

    def _failure(
        self, request: InferenceRequest, error: BatchwrightError, now: float, finish_reason: FinishReason
    ) -> InferenceResponse:
        return self._full(request, now, finish_reason, error)

    def _full(
        self, request: InferenceRequest, now: float, reason: FinishReason, error: BatchwrightError | None
    ) -> InferenceResponse:
        latency_ms, queue_ms = self._times(now)
        began = error is None or self.generated
        return InferenceResponse(
            request_id=request.request_id,
            output=self.raw if self._stops is None else self._given,
            tokens_generated=self.generated,
            latency_ms=latency_ms,
            queue_ms=queue_ms,
            finish_reason=reason,
            usage=self.measure.usage(self.prompt, self.length, self.generated) if began else Usage(0, 0),
            error=error,
            ttft_ms=None if self._first_at is None else (self._first_at - self.arrival) * 1e3,
            metadata=request.metadata,
        )
