"""`SteppedEngine`: an engine whose steps run on the event loop of its callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from batchwright.engine.engine import Engine
from batchwright.engine.engine_stats import EngineStats, UnfinishedWork
from batchwright.engine.form_compiler import FormCompiler
from batchwright.engine.step.multi_step import MOST_STEPS
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import EngineClosed
from batchwright.planning.needed_work import Answered
from batchwright.request import InferenceRequest, InferenceResponse, StreamEvent


class SteppedEngine:
    """An engine for a program that only waits for its answers.

    It has no thread: while a step is computed nothing else runs on the event loop, and between steps every task that
    got an answer runs until it waits again, usually for its next request. So a request costs no thread switch, unlike
    with `AsyncEngine`, which keeps the event loop free. Only new forms of answers are compiled on a thread, while other
    requests are computed. Requests that were submitted to the engine directly are also computed, and their responses
    are dropped.
    """

    blocking = True

    def __init__(self, engine: Engine, *, owned: bool = True) -> None:
        """`owned`: whether `close` closes the engine."""
        self._engine = engine
        self._owned = owned
        self.model_name = engine.model_name
        self.max_model_len = engine.max_model_len
        self.tokenizer: Tokenizer = engine.core.tokenizer
        self._clock = engine.core.clock
        self._forms = FormCompiler(engine.core.grammars)
        self._waiting: dict[str, asyncio.Future[InferenceResponse]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def stats(self) -> EngineStats:
        """Statistics since the engine was created."""
        return self._engine.stats

    async def generate(self, request: InferenceRequest) -> InferenceResponse:
        """Compute one request. Cancelling the awaiting task cancels it in the engine.

        Raises `InvalidRequest` if the request is refused, `EngineClosed` if the engine failed or is closed. The
        response to a request that fails later, or misses its deadline, has `error` set.
        """
        now = self._clock.now()
        form = await self._forms.form_of(request)
        self._engine.core.add(request, submitted_at=now, form=form)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[InferenceResponse] = loop.create_future()
        self._waiting[request.request_id] = answer
        if self._stepping is None:
            self._stepping = loop.create_task(self._step())
            # An interrupt in the step ends `run` anyway: it must not be reported again as an error of this task.
            self._stepping.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(request.request_id, None) is not None:
                self._engine.cancel(request.request_id)
            raise

    def stream(self, request: InferenceRequest) -> AsyncGenerator[StreamEvent]:
        """Raise NotImplementedError: no stream can be read while a step holds the event loop."""
        raise NotImplementedError("a stepped engine has no streams: use AsyncEngine")

    async def unfinished_work(self, prefix: str) -> UnfinishedWork:
        """Return what is left of the requests whose ids begin with `prefix`."""
        return self._engine.core.unfinished_work(prefix)

    def least_seconds(self, answered: Answered) -> float | None:
        """Return the least time in which this machine computes what was answered, as `Engine.least_seconds` does."""
        return self._engine.least_seconds(answered)

    async def close(self) -> None:
        """Cancel all unfinished requests, and close the engine if it is owned."""
        self._forms.close()
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
                # Let the tasks that the last step answered submit their next requests.
                await asyncio.sleep(0)
                for response in self._engine.step(MOST_STEPS):
                    answer = self._waiting.pop(response.request_id, None)
                    # It is done if it was cancelled and its task has not run since.
                    if answer is not None and not answer.done():
                        answer.set_result(response)
        except Exception as error:
            # The engine cannot continue, through no fault of any request.
            for request_id, answer in self._waiting.items():
                with suppress(Exception):
                    self._engine.cancel(request_id)
                if not answer.done():
                    closed = EngineClosed(f"the engine failed: {type(error).__name__}: {error}")
                    closed.__cause__ = error
                    answer.set_exception(closed)
            self._waiting.clear()
        finally:
            self._stepping = None
