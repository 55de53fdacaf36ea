"""The token-level loop over an engine, which has its own slots, queue and order: requests are passed on immediately."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from batchwright.batcher.entry import seconds_left
from batchwright.batcher.token_core import Shared, TokenCore
from batchwright.batcher.token_entry import TokenEntry
from batchwright.errors import GenerationError, InvalidRequest
from batchwright.request import InferenceRequest, InferenceResponse

if TYPE_CHECKING:
    from batchwright.engine.async_engine import AsyncEngine


class EngineLoop(TokenCore):
    """One task for each request in the engine."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop, shared: Shared) -> None:
        super().__init__(loop, shared)
        self._engine = engine

    def _wake(self) -> None:
        for sequence in cast("list[TokenEntry]", self._slots.fill()):
            sequence.group = self.loop.create_task(self._run(sequence))
            sequence.group.add_done_callback(partial(self._end, sequence))

    def _watch(self, sequence: TokenEntry) -> None:
        """Do nothing: the engine knows the deadline, and keeps the text so far when it passes."""

    def _left(self, sequence: TokenEntry) -> None:
        if sequence.group is not None:
            sequence.group.cancel()

    def _end(self, sequence: TokenEntry, task: asyncio.Task[None]) -> None:
        sequence.group = None
        if sequence.waits_for_answer or not task.cancelled():
            self._ended_early(task, [sequence])

    async def _run(self, sequence: TokenEntry) -> None:
        try:
            response = await self._respond(sequence)
        except InvalidRequest as error:
            if sequence.waits_for_answer:
                self._free(sequence)
                sequence.refuse(error, self._clock.now(), self._stats)
        except Exception as error:
            self._fail([sequence], error)
        else:
            if sequence.waits_for_answer:
                self._free(sequence)
                self._learn((response.latency_ms - response.queue_ms) / 1e3)
                sequence.conclude(response, self._clock.now(), self._stats)

    async def _respond(self, sequence: TokenEntry) -> InferenceResponse:
        request = self._handed(sequence)
        if not sequence.is_heard:
            return await self._engine.generate(request)
        async with contextlib.aclosing(self._engine.stream(request)) as events:
            async for event in events:
                if event.index == 0:
                    sequence.hear(event.text)
                if event.response is not None:
                    return event.response
        raise GenerationError("the engine ended the stream of the request without a response")

    def _handed(self, sequence: TokenEntry) -> InferenceRequest:
        """Return the request without its callback, which is called here, in the batcher's event loop."""
        return replace(
            cast(InferenceRequest, sequence.request),
            priority=sequence.priority,
            deadline=seconds_left(sequence.due, self._clock.now()),
            callback=None,
        )
