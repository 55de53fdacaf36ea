"""`ContinuousBatcher`: requests join and leave a batch between two tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from batchwright.batcher.base_batcher import BaseBatcher, time_allowed, urgency
from batchwright.batcher.batcher_stats import ContinuousStats
from batchwright.batcher.engine_loop import EngineLoop
from batchwright.batcher.engine_model import async_engine_of, engine_class, is_engine
from batchwright.batcher.entry import Entry
from batchwright.batcher.model import (
    ModelCall,
    RequestStepModel,
    RequestStreamModel,
    StepModel,
    StreamModel,
    TextStepModel,
    wants_text,
)  # fmt: skip
from batchwright.batcher.steps import StepCore
from batchwright.batcher.stream_ends import StreamEnds
from batchwright.batcher.streams import StreamCore
from batchwright.batcher.token_core import Shared, TokenCore
from batchwright.batcher.token_entry import Listener, TokenEntry
from batchwright.batcher.token_lengths import Measure
from batchwright.batcher.waiting_limits import WaitingLimits
from batchwright.clock import Clock
from batchwright.errors import ContextLengthExceeded, InvalidRequest
from batchwright.policies import Order
from batchwright.policies.checks import check_size
from batchwright.policies.slots import Slots
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

if TYPE_CHECKING:
    from batchwright.engine.async_engine import AsyncEngine
    from batchwright.engine.engine import Engine

_OwnModel: TypeAlias = StepModel | TextStepModel | RequestStepModel | StreamModel | RequestStreamModel
TokenModel: TypeAlias = "_OwnModel | AsyncEngine | Engine | str | Path"
"""A model that computes token by token, with steps or streams; an engine; or a model to create an engine for."""

_BATCH_SIZE = 32
_SEQUENCE_LENGTH = 2048


class ContinuousBatcher(
    BaseBatcher[TokenCore, ContinuousStats, InferenceRequest, int, float, Hashable, Listener | None]
):
    """Batcher that works token by token: a request joins as soon as a slot is free, and leaves with its last token.

        async with ContinuousBatcher(model) as batcher:
            response = await batcher.add_request("Why is the sky blue?")

    Use it if outputs differ in length: a batch computed as a whole lasts as long as its longest output, and requests
    that come meanwhile wait for its end. `model` is one of

    - a model with `generate_step(prompts, partial_outputs)`, which gets the tokens of each prompt so far and returns
      one more for each, `""` at its end;
    - a model with `generate_stream_batch(prompts)`: its batches are fixed, so free slots are filled by another batch;
    - an `AsyncEngine`, an `Engine`, which then belongs to the batcher, or the name or path of a model to create an
      engine for: then this is the engine's own loop. Creating an engine loads the model, which blocks: in a coroutine
      use `await asyncio.to_thread(ContinuousBatcher, "name")`.

    Settings:

    - `max_batch_size`: slots. `order` decides which request gets a free one; by default priority, with aging, and
      deadlines.
    - `max_sequence_length`: prompt and output together. A prompt that leaves no room for a token is refused with
      `ContextLengthExceeded`; an output that reaches it ends with "length". A prompt's length is its number of tokens
      if the model has a `tokenizer` or the prompt is token ids, else an estimate; `length` measures it in another way.
    - `max_waiting`, `max_waiting_tokens`: the most that the queue holds; more are refused with `Overloaded`.
    - `isolate_failures`: if a step raises, compute it again in halves, so that only the request at fault fails.

    An engine created here gets the first two as `max_num_seqs` and `max_model_len`. An engine passed in has its own:
    they may be omitted or repeated, and other values are refused with ValueError, as are settings that only the other
    models need. An `AsyncEngine` passed in is not closed with the batcher.
    """

    def __init__(
        self,
        model: TokenModel,
        max_batch_size: int = _BATCH_SIZE,
        max_sequence_length: int = _SEQUENCE_LENGTH,
        *,
        order: Order | None = None,
        max_waiting: int = 10_000,
        max_waiting_tokens: int | None = None,
        isolate_failures: bool = True,
        length: Callable[[Any], int] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(ContinuousStats(), clock)
        check_size("max_batch_size", max_batch_size)
        check_size("max_sequence_length", max_sequence_length)
        check_size("max_waiting", max_waiting)
        if max_waiting_tokens is not None:
            check_size("max_waiting_tokens", max_waiting_tokens)
        self.max_batch_size: Final = max_batch_size
        self.max_sequence_length: Final = max_sequence_length
        self._call: ModelCall | None = None
        self._engine: AsyncEngine | None = None
        self._owns_engine = False
        slots = places = max_batch_size
        if callable(step := getattr(model, "generate_step", None)):
            self._call = ModelCall(step, threads=1)
            self._core_in: Callable[..., TokenCore] = partial(StepCore, self._call, wants_text(step))
        elif callable(stream := getattr(model, "generate_stream_batch", None)):
            self._call = ModelCall(stream, threads=max_batch_size)
            self._core_in = partial(StreamCore, self._call, StreamEnds())
        else:
            _require_own(
                order=order,
                max_waiting_tokens=max_waiting_tokens,
                length=length,
                isolate_failures=None if isolate_failures else False,
            )
            self._engine = _engine(model, max_batch_size, max_sequence_length)
            self._owns_engine = self._engine is not model
            self._core_in = partial(EngineLoop, self._engine)
            places = self._engine.stats.max_num_seqs
            slots = places + max_waiting
            self._before = replace(self._engine.stats)
        self._measure = Measure(getattr(model, "tokenizer", None), length)
        self._shared = Shared(
            Slots(slots, order),
            places,
            WaitingLimits(max_waiting, max_waiting_tokens, isolate_failures),
            self._clock,
            self._stats,
        )

    async def stream(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> AsyncGenerator[str]:
        """Compute one request and yield its text as it is generated, usually token by token.

        Text that may be the beginning of a stop string is held back. Raises the errors of `add_request`; if a request
        fails, its error is raised after the text so far. Leaving the iterator early cancels the request.
        """
        pieces = _Pieces()
        answer = asyncio.create_task(self._ask(request, priority, deadline, tenant, pieces.put))
        answer.add_done_callback(pieces.end)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            response = await answer
            if response.error is not None:
                raise response.error
        finally:
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answer

    def start(
        self, request: InferenceRequest, listener: Listener | None = None, *, deadline: float | None = None
    ) -> asyncio.Future[InferenceResponse]:
        """Accept a request now, in the event loop to which the batcher is bound, and return a future for its answer.

        `listener` is called with each piece of its text, and finally with the response. Cancelling the future cancels
        the request. Raises the errors of `add_request`, and RuntimeError in another event loop.
        """
        here = asyncio.get_running_loop()
        core = self._settled(here)
        if core.loop is not here:
            raise RuntimeError("the batcher belongs to another event loop: call it there, or use another batcher")
        allowed = time_allowed(request.deadline, deadline)
        future: asyncio.Future[InferenceResponse] = here.create_future()
        sequence = self._entry(future, self._clock.now(), request, request.priority, allowed, None, listener)
        core.enter(sequence)
        future.add_done_callback(lambda _: core.leave(sequence))
        return future

    @property
    def held(self) -> int:
        """Number of unanswered requests that have left their slots, since they have probably ended."""
        core = self._core
        return 0 if core is None else core.held

    def stats(self) -> ContinuousStats:
        """Return a copy of the statistics since the start. With an engine, batches are the engine's steps."""
        stats = super().stats()
        if self._engine is not None:
            now, before = self._engine.stats, self._before
            stats.batches = now.steps - before.steps
            stats.items = now.occupancy_sum - before.occupancy_sum
            stats.model_seconds = now.model_seconds - before.model_seconds
        return stats

    async def add_request(
        self,
        request: InferenceRequest | Prompt,
        *,
        priority: int | None = None,
        deadline: float | None = None,
        tenant: Hashable = None,
    ) -> InferenceResponse:
        return await self._ask(request, priority, deadline, tenant)

    def _ask(
        self,
        request: InferenceRequest | Prompt,
        priority: int | None,
        deadline: float | None,
        tenant: Hashable,
        listener: Listener | None = None,
    ) -> Coroutine[Any, Any, InferenceResponse]:
        if not isinstance(request, InferenceRequest):
            request = InferenceRequest(request)
        allowed = time_allowed(request.deadline, deadline)
        return self._answer(request, urgency(request.priority, priority), allowed, tenant, listener)

    def _make(self, loop: asyncio.AbstractEventLoop) -> TokenCore:
        return self._core_in(loop, self._shared)

    def _entry(
        self,
        future: asyncio.Future[Any],
        now: float,
        request: InferenceRequest,
        priority: int,
        allowed: float,
        tenant: Hashable,
        listener: Listener | None,
    ) -> TokenEntry:
        length, most = 1, request.max_tokens
        if self._engine is None:
            length = self._measure.length(request.prompt)
            room = self.max_sequence_length - length
            if room < 1:
                raise ContextLengthExceeded(
                    f"prompt of length {length}: max_sequence_length={self.max_sequence_length} leaves no room for a "
                    "token; shorten it, allow more, or say with length= how to measure it"
                )
            if request.n != 1:
                raise InvalidRequest(
                    f"n={request.n}: the model computes one completion of a prompt; submit it several times", param="n"
                )
            if request.logprobs is not None:
                raise InvalidRequest(
                    f"logprobs={request.logprobs}: the model gives text only; leave it out, or use an engine",
                    param="logprobs",
                )
            if request.prompt_logprobs is not None:
                raise InvalidRequest(
                    f"prompt_logprobs={request.prompt_logprobs}: the model gives text only; leave it out, or use an "
                    "engine",
                    param="prompt_logprobs",
                )
            if request.stop_token_ids:
                raise InvalidRequest(
                    f"stop_token_ids={list(request.stop_token_ids)}: the model gives text, not token ids; use stop, or "
                    "an engine",
                    param="stop_token_ids",
                )
            most = min(most, room)
        return TokenEntry(
            now,
            length,
            priority,
            now + allowed,
            tenant,
            max_tokens=request.max_tokens,
            future=future,
            prompt=request.prompt,
            request=request,
            most=most,
            measure=self._measure,
            listener=listener,
        )

    def _waiting(self) -> int:
        return self._shared.waiting

    def _waiting_entries(self) -> Sequence[Entry]:
        return cast("Sequence[Entry]", self._shared.waiting_items)

    async def _release(self) -> None:
        if self._call is not None:
            self._call.close()
        if self._engine is not None and self._owns_engine:
            await self._engine.close()


class _Pieces:
    """Pieces of text on their way from the event loop of the batcher to that of the reader."""

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()

    def put(self, piece: str | InferenceResponse) -> None:
        """Add a piece, in the event loop of the batcher. Ignored if the reader's loop has been closed."""
        if isinstance(piece, InferenceResponse) or not piece:
            return
        if asyncio.get_running_loop() is self._home:
            self._queue.put_nowait(piece)
        else:
            with contextlib.suppress(RuntimeError):
                self._home.call_soon_threadsafe(self._queue.put_nowait, piece)

    def end(self, answer: object) -> None:
        """Add the end, in the event loop of the reader, after all pieces."""
        self._queue.put_nowait(None)

    async def get(self) -> str | None:
        """Return the next piece; None at the end."""
        return await self._queue.get()


def _engine(model: Any, max_batch_size: int, max_sequence_length: int) -> AsyncEngine:
    """Return the given engine, or one created for a model. Raises TypeError, ValueError and the engine's errors."""
    if isinstance(model, (str, Path)):
        return engine_class()(model, max_num_seqs=max_batch_size, max_model_len=max_sequence_length)
    if not is_engine(model):
        raise TypeError(
            f"model of type {type(model).__name__}: must have generate_step(prompts, partial_outputs) or "
            "generate_stream_batch(prompts), or be an engine or the name of a model for one"
        )
    for name, value, default, own, setting in (
        ("max_batch_size", max_batch_size, _BATCH_SIZE, model.stats.max_num_seqs, "max_num_seqs"),
        ("max_sequence_length", max_sequence_length, _SEQUENCE_LENGTH, model.max_model_len, "max_model_len"),
    ):
        if value not in (default, own):
            raise ValueError(f"{name}={value}: the engine was made with {setting}={own}; leave it out, or change that")
    return async_engine_of(model)


def _require_own(**settings: object) -> None:
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name}: an engine sees to that itself; leave it out")
