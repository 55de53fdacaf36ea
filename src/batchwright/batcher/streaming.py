"""`StreamingBatchProcessor`: the tokens of many requests in one stream, as they are generated."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any

from batchwright.batcher.continuous import ContinuousBatcher, TokenModel
from batchwright.batcher.engine_model import is_engine
from batchwright.batcher.model import is_being_cancelled
from batchwright.batcher.processor import Processor
from batchwright.errors import BatcherClosed, BatchwrightError, InvalidRequest
from batchwright.policies.checks import check_size
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_UNREAD = 64
"""Unread tokens per slot at which no further request is started."""


class StreamingBatchProcessor(Processor[ContinuousBatcher]):
    """Processor of any number of requests, `batch_size` at a time, that yields their tokens as they are generated.

        async with StreamingBatchProcessor(model) as processor:
            async for request_id, token in processor.process_streaming(requests):
                ...

    Use it to read many outputs at once while they are generated. When a request ends, the next one takes its slot, so a
    slow request delays no other. `model` and `options` are those of `ContinuousBatcher`, which it uses as `batcher`.
    """

    def __init__(self, model: TokenModel, batch_size: int = 8, **options: Any) -> None:
        check_size("batch_size", batch_size)
        self.batch_size = batch_size
        if is_engine(model):
            self.batcher = ContinuousBatcher(model, **options)
        else:
            self.batcher = ContinuousBatcher(model, batch_size, **options)

    async def process_streaming(
        self,
        requests: Iterable[InferenceRequest | Prompt] | AsyncIterable[InferenceRequest | Prompt],
        failures: MutableMapping[str, BatchwrightError] | None = None,
    ) -> AsyncGenerator[tuple[str, str]]:
        """Yield `(request_id, token)` for all `requests`, each request's tokens in order, as soon as they are
        available.

        `requests` is read as slots become free, never ahead, and may be infinite. A bare prompt gets its own id. Tokens
        that may be the beginning of a stop string come later, in one piece with others. Each request's `callback` is
        called with its response. While the reader lags behind, no further request is started.

        A request that fails does not affect the others. Its error is stored in `failures` under its id immediately;
        without `failures`, all errors are raised together after everything else has been read, as an ExceptionGroup
        whose members name their request in a note. An error of `requests` itself is raised after everything that was
        started has been read.

        Leaving the iterator early cancels running requests (with `contextlib.aclosing`, immediately). Raises
        RuntimeError in an event loop other than the one to which this belongs.
        """
        await self.batcher.settle()
        collected: MutableMapping[str, BatchwrightError] = {} if failures is None else failures
        reading = _Reading(self.batcher, self.batch_size, _each(requests), collected)
        try:
            while (piece := await reading.next()) is not None:
                yield piece
        finally:
            await reading.stop()
        if failures is None and collected:
            for request_id, error in collected.items():
                error.add_note(f"request {request_id}")
            raise ExceptionGroup(
                f"{len(collected)} request{'s' * (len(collected) > 1)} failed",
                [*collected.values(), *filter(None, [reading.broken])],
            )
        if reading.broken is not None:
            raise reading.broken


class _Reading:
    """One pass over some requests: a task starts them as there is room, and their tokens are collected here."""

    def __init__(
        self,
        batcher: ContinuousBatcher,
        size: int,
        requests: AsyncIterator[InferenceRequest | Prompt],
        failures: MutableMapping[str, BatchwrightError],
    ) -> None:
        self.broken: Exception | None = None
        """The error because of which no more requests could be started."""
        self._batcher = batcher
        self._size = size
        self._requests = requests
        self._failures = failures
        self._live: dict[str, asyncio.Future[InferenceResponse]] = {}
        self._unread: deque[tuple[str, str]] = deque()
        self._changed = asyncio.Event()
        """Set when there is something to read, or nothing more will come."""
        self._room = asyncio.Event()
        """Set when something has ended, or has been read."""
        self._feeder = asyncio.create_task(self._feed())
        self._feeder.add_done_callback(lambda _: self._changed.set())

    async def next(self) -> tuple[str, str] | None:
        """Return the next token; None when all have been read."""
        while not self._unread:
            if self._feeder.done() and not self._live:
                return None
            self._changed.clear()
            await self._changed.wait()
        piece = self._unread.popleft()
        self._room.set()
        return piece

    async def stop(self) -> None:
        """Cancel what still runs."""
        self._feeder.cancel()
        for answer in self._live.values():
            answer.cancel()
        await asyncio.gather(self._feeder, return_exceptions=True)

    async def _feed(self) -> None:
        try:
            position = 0
            while True:
                while len(self._live) - self._batcher.held >= self._size or len(self._unread) >= self._size * _UNREAD:
                    self._room.clear()
                    await self._room.wait()
                if not self._begin(await anext(self._requests), position):
                    # However many are refused, other tasks get their turn.
                    await asyncio.sleep(0)
                position += 1
        except StopAsyncIteration:
            pass
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            self.broken = RuntimeError("requests: what gives them was cancelled")
            self.broken.__cause__ = error
        except Exception as error:
            self.broken = error

    def _begin(self, request: InferenceRequest | Prompt, position: int) -> bool:
        """Start a request; False if it is refused. Raises `BatcherClosed`."""
        request_id = request.request_id if isinstance(request, InferenceRequest) else f"requests[{position}]"
        try:
            if not isinstance(request, InferenceRequest):
                request = InferenceRequest(request)
                request_id = request.request_id
            if request_id in self._live:
                raise InvalidRequest(
                    f"request_id={request_id!r} is being computed: give each its own", param="request_id"
                )
            self._live[request_id] = self._batcher.start(request, partial(self._hear, request_id))
        except BatcherClosed:
            raise
        except BatchwrightError as error:
            self._failures[request_id] = error
            return False
        return True

    def _hear(self, request_id: str, news: str | InferenceResponse) -> None:
        if news == "":
            self._room.set()
            return
        self._changed.set()
        if isinstance(news, str):
            self._unread.append((request_id, news))
            return
        answer = self._live.pop(request_id)
        if news.error is not None:
            self._failures[request_id] = news.error
        if not answer.cancelled():
            # It carries the same error, if the request was refused.
            answer.exception()
        self._room.set()


def _each(requests: Any) -> AsyncIterator[InferenceRequest | Prompt]:
    if isinstance(requests, AsyncIterable):
        return aiter(requests)
    if isinstance(requests, (str, bytes, InferenceRequest, Mapping)) or not isinstance(requests, Iterable):
        raise TypeError(f"requests of type {type(requests).__name__}: must be a list or an iterator of requests")
    return _one_by_one(requests)


async def _one_by_one(requests: Iterable[InferenceRequest | Prompt]) -> AsyncGenerator[InferenceRequest | Prompt]:
    for request in requests:
        yield request
