"""`AsyncEngine`: the engine on its own thread, for servers and other asyncio programs.

Only the thread touches the engine. Coroutines send it commands and get events back through their own event loops, so
nothing is locked and a slow reader does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Self

from batchwright.engine.continuations import Scoring, TextOrTokens
from batchwright.engine.engine import Engine
from batchwright.engine.engine_stats import EngineStats, UnfinishedWork
from batchwright.engine.form_compiler import FormCompiler
from batchwright.engine.grammars import Form
from batchwright.engine.scoring import PromptScores
from batchwright.engine.step.multi_step import MOST_STEPS
from batchwright.engine_config import EngineConfig
from batchwright.errors import BatchwrightError, EngineClosed, GenerationError
from batchwright.models import DEFAULT_MODEL
from batchwright.planning.needed_work import Answered
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams, Score, StreamEvent

_Item = StreamEvent | BatchwrightError
_MOST_TAKEN = 64
"""Requests that are taken between two steps: sequences wait meanwhile for as long as these take to tokenize."""


class _Reader:
    """Queue of the events of one request, in the event loop that reads them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()

    def put(self, item: _Item) -> None:
        """Add `item`, on the engine's thread; does nothing if the loop has been closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self) -> StreamEvent:
        item = await self._items.get()
        if isinstance(item, BatchwrightError):
            raise item
        return item


class AsyncEngine:
    """One engine for many coroutines. Takes the arguments of `Engine`, and raises the same errors.

    The constructor loads the model, which blocks: in a coroutine use `await asyncio.to_thread(AsyncEngine, …)`. If
    `model` is an `Engine`, the new object takes it over, and closes it when it is closed.
    """

    blocking = False
    """Whether the event loop is blocked while the engine computes."""

    def __init__(
        self, model: str | Path | Engine = DEFAULT_MODEL, config: EngineConfig | None = None, **options: Any
    ) -> None:
        if isinstance(model, Engine) and (options or config is not None):
            raise ValueError(f"{next(iter(options), 'config')}: the engine that is given has its own; leave it out")
        self._engine = model if isinstance(model, Engine) else Engine(model, config, **options)
        self.model_name = self._engine.model_name
        self.max_model_len = self._engine.max_model_len
        """Maximum number of tokens of prompt and output together."""
        self.tokenizer = self._engine.core.tokenizer
        """Tokenizer of the model. Any thread may encode with it, which does not change it."""
        self._clock = self._engine.core.clock
        self._interruption = self._engine.core.interruption
        self._forms = FormCompiler(self._engine.core.grammars)
        self._commands: deque[Callable[[], None]] = deque()
        self._added = 0
        """Requests that came since the last step."""
        self._wake = threading.Event()
        self._closing = False
        self._ended = False
        """Whether the thread has carried out its last command, or is about to."""
        self._failure: BaseException | None = None
        self._stats = self._engine.stats.copy()
        """Copy that the engine's thread made, and that never changes."""
        self._readers: dict[str, _Reader] = {}
        """Readers by request id, used by the engine's thread only."""
        self._thread = threading.Thread(target=self._run, name="batchwright-engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        """Copy of the statistics since the engine was created, as of its last step; any thread may read it."""
        return self._stats

    async def generate(
        self, prompt: Prompt | InferenceRequest, sampling_params: SamplingParams | None = None
    ) -> InferenceResponse:
        """Compute one prompt or request. Cancelling the awaiting task cancels it in the engine.

        Raises `InvalidRequest` if the request is refused, `EngineClosed` if the engine is closed. The response to a
        request that fails later, or exceeds its deadline, has `error` set.
        """
        async with contextlib.aclosing(self._events(as_request(prompt, sampling_params), stream=False)) as events:
            async for event in events:
                if event.response is not None:
                    return event.response
        raise EngineClosed("the engine gave no answer")

    async def stream(
        self, prompt: Prompt | InferenceRequest, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[StreamEvent]:
        """Compute one prompt and yield its text as it is generated; the last event carries the response.

        Raises the same errors as `generate`. Leaving the iterator early cancels the request.
        """
        async with contextlib.aclosing(self._events(as_request(prompt, sampling_params), stream=True)) as events:
            async for event in events:
                yield event

    async def score(
        self, contexts: TextOrTokens | Sequence[TextOrTokens], continuations: Sequence[TextOrTokens]
    ) -> list[Score]:
        """Return the log-likelihood of each of `continuations` after its context, as `Engine.score` does.

        Cancelling the awaiting task cancels what is not computed yet. Raises `EngineClosed` if the engine is closed.
        """
        scoring = await asyncio.to_thread(Scoring, contexts, continuations, self.tokenizer)

        async def ask(request: InferenceRequest) -> None:
            scores = scoring.prompt_scores[request.request_id]
            error: BatchwrightError | None = None
            try:
                async with contextlib.aclosing(self._events(request, stream=False, scores=scores)) as events:
                    async for event in events:
                        error = event.response.error if event.response is not None else error
            except EngineClosed:
                raise
            except BatchwrightError as refusal:
                error = refusal
            scoring.answered(request.request_id, error)

        tasks = [asyncio.ensure_future(ask(request)) for request in scoring.requests]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return scoring.scores()

    async def unfinished_work(self, prefix: str) -> UnfinishedWork:
        """Return what is left of the requests whose ids begin with `prefix`, as of between two steps.

        Raises `EngineClosed` if the engine is closed.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[UnfinishedWork] = loop.create_future()

        def answer(work: UnfinishedWork) -> None:
            if not found.done():
                found.set_result(work)

        def look() -> None:
            work = self._engine.core.unfinished_work(prefix)
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(answer, work)

        self._command(look)
        return await found

    def least_seconds(self, answered: Answered) -> float | None:
        """Return the least time in which this machine computes what was answered, as `Engine.least_seconds` does.

        It reads only what no step changes, so it does not wait for a step.
        """
        return self._engine.least_seconds(answered)

    async def close(self) -> None:
        """End unfinished requests with `EngineClosed`, stop the thread, free the model. May be called repeatedly."""
        self._closing = True
        self._forms.close()
        self._notify()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _events(
        self, request: InferenceRequest, *, stream: bool, scores: PromptScores | None = None
    ) -> AsyncGenerator[StreamEvent]:
        reader = _Reader()
        now = self._clock.now()
        if self._closing:
            raise EngineClosed("the engine is closed") from self._failure
        form = await self._forms.form_of(request)
        self._command(lambda: self._add(request, reader, stream=stream, submitted_at=now, form=form, scores=scores))
        ended = False
        try:
            while not ended:
                event = await reader.get()
                ended = event.response is not None
                yield event
        except BatchwrightError:
            ended = True
            raise
        finally:
            if not ended:
                self._command(lambda: self._cancel(request.request_id, reader), quietly=True)

    def _command(self, command: Callable[[], None], *, quietly: bool = False) -> None:
        if self._closing or not self._thread.is_alive():
            if quietly:
                return
            raise EngineClosed("the engine is closed") from self._failure
        self._commands.append(command)
        self._notify()
        # The thread sets `_ended` before it empties the queue for the last time: if it may have missed this command,
        # `_ended` is set by now.
        if self._ended and not quietly:
            raise EngineClosed("the engine is closed") from self._failure

    def _notify(self) -> None:
        """Have the thread look for commands after the step that it is computing."""
        self._interruption.set()
        self._wake.set()

    def _add(
        self,
        request: InferenceRequest,
        reader: _Reader,
        *,
        stream: bool,
        submitted_at: float,
        form: Form | None,
        scores: PromptScores | None,
    ) -> None:
        self._added += 1
        try:
            self._engine.core.add(request, stream=stream, submitted_at=submitted_at, form=form, scores=scores)
        except BatchwrightError as error:
            reader.put(error)
        except Exception as error:  # whatever it is, it fails this request only
            failure = GenerationError(f"the request could not be taken: {type(error).__name__}: {error}")
            failure.__cause__ = error
            reader.put(failure)
        else:
            self._readers[request.request_id] = reader

    def _cancel(self, request_id: str, reader: _Reader) -> None:
        if self._readers.get(request_id) is reader:
            del self._readers[request_id]
            self._engine.core.cancel(request_id)

    def _run(self) -> None:
        core = self._engine.core
        try:
            while not self._closing:
                # In this order: a command that came between the two calls would otherwise wait for more than one step.
                self._interruption.clear()
                # While nothing waits for a step, it may as well be a full one.
                places = core.scheduler.max_num_seqs
                self._obey(_MOST_TAKEN if core.scheduler.has_work else max(_MOST_TAKEN, places))
                if core.scheduler.has_work:
                    events = core.step(1 if self._commands else MOST_STEPS)
                    self._stats = self._engine.stats.copy()
                    self._dispatch(events)
                elif not self._commands:
                    self._stats = self._engine.stats.copy()
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._closing = True
            self._shut_down()

    def _obey(self, most: int) -> None:
        """Carry out commands in the order in which they came, until they have added `most` requests."""
        self._added = 0
        while self._commands and self._added < most:
            self._commands.popleft()()

    def _dispatch(self, events: list[StreamEvent]) -> None:
        for event in events:
            reader = self._readers.get(event.request_id)
            if reader is not None:
                if event.response is not None:
                    del self._readers[event.request_id]
                reader.put(event)

    def _shut_down(self) -> None:
        """End all requests, both those being computed and those whose command came too late."""
        self._ended = True
        try:
            while self._commands:
                self._obey(_MOST_TAKEN)
            events = self._engine.core.close()
            self._stats = self._engine.stats.copy()
            self._dispatch(events)
        finally:
            for reader in self._readers.values():
                reader.put(EngineClosed("the engine stopped before the request was finished"))
            self._readers.clear()
            self._engine.close()


def as_request(prompt: Prompt | InferenceRequest, params: SamplingParams | None) -> InferenceRequest:
    """Return a request for `prompt`. Raises ValueError for several prompts, or for a request with `params`."""
    if isinstance(prompt, InferenceRequest):
        if params is not None:
            raise ValueError("sampling_params: a request brings its own, leave it out")
        return prompt
    if isinstance(prompt, list) and any(isinstance(item, (str, list, InferenceRequest)) for item in prompt):
        raise ValueError("prompt: give one prompt to each call, and gather the calls of several")
    return InferenceRequest.of(prompt, params or SamplingParams())
