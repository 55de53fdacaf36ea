"""`ProviderBatchInference`: calls computed in a provider's batches, at its price for batches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import BatchwrightError, DeadlineExceeded, EndpointError, EngineClosed, InvalidRequest
from batchwright.inference.batches.account import BatchAccount
from batchwright.inference.batches.desk import BatchDesk
from batchwright.inference.batches.held import HeldLine, Outcome, line_name
from batchwright.inference.batches.provider import BatchProvider, LineResult
from batchwright.inference.batches.times import BatchTimes
from batchwright.inference.calls import chosen_model, time_left
from batchwright.inference.inference import Call, Inference, pacing_of, send_no_more
from batchwright.inference.metering import Meter, NoMeter
from batchwright.pacing.figures import PacerFigures
from batchwright.wire.bounds import require_sizes
from batchwright.wire.dialects import OPENAI, Dialect, require_endpoint
from batchwright.wire.fields import deadline_seconds
from batchwright.wire.requests import (
    ENCODER_URLS,
    RESPONSES_URL,
    filled,
    read_model,
    require_few_completions,
    require_response_now,
)

_BYTES_OF_A_LINE = 8_000
"""Bytes of memory of a waiting line without its body: a task, a future and their frames."""
_COPIES = 3
"""Number of copies of a body's text in memory, as objects."""
_SHARE_OF_MEMORY = 0.25
_UNSENT = 2
"""Batches waiting to be submitted at which no more lines are wanted."""
_ASSUMED_SECONDS = 10.0
"""Assumed seconds of a live request, until one has been made."""


class InABatch(BatchwrightError):
    """Reason for the wait of a line that need not be held: it is in a batch at a provider."""

    code = "in_a_batch"


_IN_A_BATCH = InABatch("it is in a batch at the provider")


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """The job whose lines go into batches."""

    folder: Path
    """Folder of the journal, created when it is needed."""
    is_finished: Callable[[str], bool] = lambda request_id: False
    """Whether the line of a call with this id already has its result."""
    forgets_failures: bool = False
    """Whether errors that earlier runs collected do not count, since failed lines are retried."""
    lines_left: Callable[[], int] = lambda: 0
    """Number of lines that the inference has not received yet."""
    account: BatchAccount = field(default_factory=BatchAccount)


class ProviderBatchInference(Inference):
    """Gathers calls into batches of a provider, and answers each when its batch has ended.

    Calls are identified by their `request_id`: one that is in a batch of an earlier run, by the journal, waits for it.

    - `live`: computes lines that become live requests, and knows the models; it is closed with this.
    - `dialect`: the provider's dialect, which may not have all endpoints.
    - `window`: completion window of the batches, such as `24h`.
    - `deadline`: seconds from the beginning of the job by which its lines must be done: with `moves`, lines that
      batches would finish too late become live requests; otherwise such lines fail.
    - `concurrency`: concurrent live requests, for the forecast of how long they take.
    """

    def __init__(
        self,
        provider: BatchProvider,
        live: Inference,
        job: BatchJob,
        *,
        dialect: Dialect = OPENAI,
        window: str = "24h",
        deadline: float | None = None,
        moves: bool = False,
        concurrency: int = 64,
        meter: Meter | None = None,
        clock: Clock | None = None,
        unix_time: Callable[[], float] = time.time,
        times: BatchTimes | None = None,
        most_bytes: float | None = None,
    ) -> None:
        """`most_bytes`: approximate memory that waiting lines may take; by default a quarter of this machine's."""
        self._provider = provider
        self._live = live
        self._dialect = dialect
        self._meter = meter or NoMeter()
        self._concurrency = concurrency
        self._clock = clock or MonotonicClock()
        self._most_bytes = memory_for_lines() if most_bytes is None else most_bytes
        self._bytes = 0
        self._live_done = 0
        self._live_since = 0.0
        self.account = job.account
        self._desk = BatchDesk(
            provider,
            job.folder,
            window=window,
            clock=self._clock,
            unix_time=unix_time,
            times=times or BatchTimes(),
            account=job.account,
            is_finished=job.is_finished,
            forgets_failures=job.forgets_failures,
            deadline=deadline,
            moves=moves,
            lines_left=job.lines_left,
            live_rate=self._live_rate,
        )
        self._opening: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def models(self) -> Sequence[str]:
        return self._live.models

    @property
    def wants(self) -> int:
        if self._closed or self._desk.unsent >= _UNSENT:
            return 0
        if self._desk.live_only:
            return max(0, self._live.wants)
        # Lines still to come have texts of unknown length, for which the same amount is reserved.
        return max(0, int((self._most_bytes - self._bytes) / (2 * _BYTES_OF_A_LINE)))

    @property
    def standing(self) -> str | None:
        """Where the lines are, fit to be shown; None if there is none."""
        return self._desk.standing

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what was learned about the limits of live requests, by model."""
        return pacing_of(self._live)

    def send_no_more(self) -> None:
        """Send no more live requests; lines waiting for a batch go into the journal, or into the next run."""
        send_no_more(self._live)

    async def answer(self, call: Call) -> dict[str, Any]:
        """See `Inference.answer`. A cancelled line stays in its batch, and the next call with its id finds it."""
        if self._closed:
            raise EngineClosed("nothing more is sent to the provider: the run has ended")
        body = self._outgoing(call)
        name = line_name(call.request_id)
        size = len(self._provider.line(self._provider.custom_id("0" * 36, name), call.endpoint, body)) + 1
        if size > self._provider.limits.size:
            raise InvalidRequest(
                f"the line has {size:,} bytes, and a batch of {self._provider.name} at most "
                f"{self._provider.limits.size:,}: shorten it",
                code="line_too_long",
            )
        left = time_left(call, deadline_seconds(call.body))
        limit = asyncio.timeout(left)
        weight = _BYTES_OF_A_LINE + _COPIES * size
        self._bytes += weight
        try:
            async with limit:
                outcome = await self._outcome(call, name, body, size)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the time for this request passed before its batch ended") from None
        finally:
            self._bytes -= weight
        if isinstance(outcome, LineResult):
            return self._answer_of(call, outcome)
        return await self._answered_live(call)

    async def _outcome(self, call: Call, name: str, body: Mapping[str, Any], size: int) -> Outcome:
        await self._opened()
        is_fetched = self._desk.has_result(name)
        reservation = await self._meter.reserve(call, body, size, batch=True, is_fetched=is_fetched)
        line = HeldLine(call, name, body, size, asyncio.get_running_loop().create_future(), reservation)
        try:
            self._desk.take(line)
            if not line.future.done() and call.pauses is not None:
                call.pauses(_IN_A_BATCH)
            return await line.future
        except asyncio.CancelledError:
            self._desk.leave(line)
            raise
        finally:
            if call.pauses is not None:
                call.pauses(None)

    async def _opened(self) -> None:
        """Wait until the journal of earlier runs is read."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._desk.open())
        if not self._opening.done():
            await asyncio.shield(self._opening)
        if (error := self._opening.exception()) is not None:
            raise EngineClosed(str(error)) from error

    def _outgoing(self, call: Call) -> dict[str, Any]:
        """Return the body as it is sent to the provider. Raises `BatchwrightError`."""
        require_endpoint(self._dialect, call.endpoint)
        require_sizes(call.body)
        if call.endpoint == RESPONSES_URL:
            require_response_now(call.body)
        elif call.endpoint not in ENCODER_URLS:
            require_few_completions(call.body)
        body = filled(call.endpoint, call.body, call.defaults)
        model = read_model(call.body)
        if self._live.models:
            body["model"] = chosen_model(model, self._live.models)
        return body

    def _answer_of(self, call: Call, result: LineResult) -> dict[str, Any]:
        if result.answer is not None:
            if "model" in result.answer and self._live.models:
                result.answer["model"] = read_model(call.body) or self._live.models[0]
            return result.answer
        body: dict[str, object] = dict(result.error or {})
        message = str(body.get("message") or "no reason given")
        raise EndpointError(message, status=result.status, body=body)

    async def _answered_live(self, call: Call) -> dict[str, Any]:
        self._desk.live += 1
        if not self._live_done:
            self._live_since = self._live_since or self._clock.now()
        try:
            return await self._live.answer(call)
        finally:
            self._desk.live -= 1
            self._live_done += 1

    def _live_rate(self) -> float:
        """Return the lines per second of live requests: as measured, or as assumed until there are any."""
        assumed = self._concurrency / _ASSUMED_SECONDS
        elapsed = self._clock.now() - self._live_since
        if self._live_done < self._concurrency or elapsed < _ASSUMED_SECONDS:
            return assumed
        return self._live_done / elapsed

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise InvalidRequest("stream is not possible in a provider's batch", param="stream")
        yield {}

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._desk.close()
        await self._provider.close()
        await self._live.close()


def memory_for_lines() -> float:
    """Return the bytes of memory that lines waiting for batches may take."""
    return _SHARE_OF_MEMORY * float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
