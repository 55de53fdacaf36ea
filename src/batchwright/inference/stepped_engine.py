"""`SteppedEngine`: an engine that is stepped by the event loop of those who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from batchwright.engine.engine import Engine
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import EngineClosed
from batchwright.request import InferenceRequest, InferenceResponse, StreamEvent


class SteppedEngine:
    """An engine for a program that has nothing else to do than to wait for its answers.

    It has no thread: while a step is computed nothing else runs on the event loop, and between steps everybody who got
    an answer goes on until it waits again, most with the next request. So a request costs no switch of threads, which
    is what `AsyncEngine` pays for an event loop that is always free. Requests that others submitted to the engine are
    computed along, and their responses are dropped.
    """

    blocking = True

    def __init__(self, engine: Engine, *, owned: bool = True) -> None:
        """`owned`: whether the engine is closed with this one."""
        self._engine = engine
        self._owned = owned
        self.model_name = engine.model_name
        self.max_model_len = engine.max_model_len
        self.tokenizer: Tokenizer = engine.core.tokenizer
        self._waiting: dict[str, asyncio.Future[InferenceResponse]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def stats(self) -> EngineStats:
        """Figures since the engine was made."""
        return self._engine.stats

    async def generate(self, request: InferenceRequest) -> InferenceResponse:
        """Compute one request. Cancelling the awaiting task cancels it in the engine.

        Raises `InvalidRequest` when it is refused, `EngineClosed` when the engine failed or is closed; a request that
        fails later, or whose deadline passes, is answered with `error` set.
        """
        self._engine.submit(request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[InferenceResponse] = loop.create_future()
        self._waiting[request.request_id] = answer
        if self._stepping is None:
            self._stepping = loop.create_task(self._step())
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(request.request_id, None) is not None:
                self._engine.cancel(request.request_id)
            raise

    def stream(self, request: InferenceRequest) -> AsyncGenerator[StreamEvent]:
        """Raises NotImplementedError: nobody reads a stream while the step that makes it holds the event loop."""
        raise NotImplementedError("a stepped engine has no streams: use AsyncEngine")

    async def close(self) -> None:
        """Let go of the engine. What is not finished is cancelled."""
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
        for request_id, answer in self._waiting.items():
            answer.cancel()
            self._engine.cancel(request_id)
        self._waiting.clear()
        if self._owned:
            self._engine.close()

    async def _step(self) -> None:
        try:
            while self._waiting:
                # Those that were answered by the step before ask for more before the next.
                await asyncio.sleep(0)
                for response in self._engine.step():
                    answer = self._waiting.pop(response.request_id, None)
                    # Cancelled: its task has not run since.
                    if answer is not None and not answer.done():
                        answer.set_result(response)
        except Exception as error:
            self._fail(error)
        finally:
            self._stepping = None

    def _fail(self, error: Exception) -> None:
        """The engine cannot go on, which is no fault of any request."""
        for request_id, answer in self._waiting.items():
            with suppress(Exception):
                self._engine.cancel(request_id)
            if not answer.done():
                closed = EngineClosed(f"the engine failed: {type(error).__name__}: {error}")
                closed.__cause__ = error
                answer.set_exception(closed)
        self._waiting.clear()
