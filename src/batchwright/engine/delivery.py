"""What callers get from the steps: tokens, events, and the answer that ends a request.

It holds the unfinished requests. An error in one of them, whether from foreign code or the model, fails no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from batchwright.clock import Clock
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.generation import Generation, RequestState
from batchwright.engine.sampling import Sampled
from batchwright.engine.work_meter import WorkMeter
from batchwright.errors import BatchwrightError, EngineClosed, GenerationError, NonFiniteLogits
from batchwright.request import FinishReason, InferenceRequest, InferenceResponse, StreamEvent
from batchwright.scheduling import Chunk, Scheduler, Sequence, StepPlan

_log = logging.getLogger(__name__)

_NOT_FINITE = "the model produced NaN or infinite logits for this request"


class Delivery:
    """Unfinished requests of an engine, and the delivery of tokens to their callers."""

    def __init__(self, scheduler: Scheduler, clock: Clock, stats: EngineStats) -> None:
        self._scheduler, self._clock, self._stats = scheduler, clock, stats
        self.requests: dict[str, RequestState] = {}
        """Unfinished requests by their ids."""
        self.generations: dict[int, Generation] = {}
        """Unfinished generations by the ordinals of their sequences."""
        self.events: list[StreamEvent] = []
        """Events for the caller, who has not taken them yet: a step that is interrupted leaves them to the next."""
        self.meter: WorkMeter | None = None
        """The meter of the work that answers needed, if there is one."""
        self._callbacks: list[tuple[Callable[[InferenceResponse], object], InferenceResponse]] = []
        """Callbacks to call after the step, since a callback may itself submit or cancel."""

    def expect(self, state: RequestState) -> None:
        """Add a request whose sequences the scheduler has already."""
        self.requests[state.request.request_id] = state
        for generation in state.generations:
            self.generations[generation.sequence.ordinal] = generation

    def take_events(self) -> list[StreamEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def settle_all(self, plan: StepPlan, now: float) -> None:
        """End or fail requests according to what a step has shown of their prompts."""
        for chunk in plan.chunks:
            if chunk.scored or chunk.ends:
                self.events += self._settle(chunk, now)

    def deliver(self, chunk: Chunk, chosen: list[Sampled], now: float) -> None:
        """Deliver the token after the chunk and, as long as its drafts are right, the tokens after them."""
        accepted = 0
        generation = self.generations.get(chunk.sequence.ordinal)
        if generation is not None:
            generation.chain += 1
            generation.turns += chunk.is_decode and chunk.start >= chunk.sequence.num_prompt
        for place, outcome in enumerate(chosen):
            generation = self.generations.get(chunk.sequence.ordinal)
            if generation is None or generation.finish_reason is not None:
                break  # it has ended, or another completion of the same request has just failed
            generation.known = len(chunk.sequence.tokens)
            event = self._deliver_token(generation, outcome, now)
            if event is not None:
                self.events.append(event)
            if place == len(chunk.drafts) or outcome.token != chunk.drafts[place]:
                break
            self._scheduler.accept_draft(chunk.sequence)
            accepted += 1
        if chunk.drafts and chunk.sequence.drafter is not None:
            chunk.sequence.drafter.settle(len(chunk.drafts), accepted)
            self._stats.drafted_tokens += len(chunk.drafts)
            self._stats.accepted_tokens += accepted
        self._deliver_forced(chunk.sequence, now)

    def fail(self, state: RequestState, error: BatchwrightError, reason: FinishReason = "error") -> StreamEvent:
        """End a request now with an error and its answer so far, and free its slots and blocks."""
        state.error = error
        for generation in state.generations:
            if generation.finish_reason is None:
                generation.finish_reason = reason
            self._scheduler.finish(generation.sequence)
        self._forget(state)
        self._stats.traffic[state.request.traffic].failed += 1
        now = self._clock.now()
        try:
            response = state.response(now)
        except Exception:  # the tokenizer cannot decode the answer so far
            response = state.response(now, text=False)
        self._answer(state.request, response)
        first = state.generations[0]
        return StreamEvent(state.request.request_id, first.index, "", (), first.finish_reason, response)

    def end_all(self, reason: str) -> None:
        """End all requests with `EngineClosed`."""
        for state in list(self.requests.values()):
            self.events.append(self.fail(state, EngineClosed(reason)))

    def call_back(self) -> None:
        """Call the callbacks of the requests that have ended since the last call."""
        while self._callbacks:
            callback, response = self._callbacks.pop(0)
            try:
                callback(response)
            except Exception:  # the caller's code: other requests must get their answers whatever it raises
                _log.exception("the callback of request %s raised", response.request_id)

    def _settle(self, chunk: Chunk, now: float) -> list[StreamEvent]:
        """Fail a request whose prompt has scores that are not finite; end one for which nothing else was wanted."""
        generation = self.generations.get(chunk.sequence.ordinal)
        if generation is None:  # another completion of the same request has just failed it
            return []
        state = generation.owner
        if state.scores is not None and not state.scores.is_finite:
            self._scheduler.forget(generation.sequence)
            return [self.fail(state, NonFiniteLogits(_NOT_FINITE))]
        if not chunk.ends:
            return []
        generation.finish_reason = "length"
        try:
            response = state.response(now) if state.done else None
        except Exception as error:  # a tokenizer is foreign code; whatever it raises fails this request only
            return [self.fail(state, _tokenizer_failed(error))]
        self._scheduler.finish(generation.sequence)
        if response is not None:
            self._complete(state, response)
        elif not state.streams:
            return []
        return [StreamEvent(state.request.request_id, generation.index, "", (), "length", response)]

    def _deliver_token(self, generation: Generation, outcome: Sampled, now: float) -> StreamEvent | None:
        state = generation.owner
        if generation.matcher is not None and (failure := generation.matcher.failure) is not None:
            return self.fail(state, failure)
        if outcome.token is None:
            self._scheduler.forget(generation.sequence)
            return self.fail(state, NonFiniteLogits(_NOT_FINITE))
        traffic = self._stats.traffic[state.request.traffic]
        if state.first_token_at is None:
            state.first_token_at = now
            ttft = (now - state.submitted_at) * 1e3
            self._stats.ttft_ms.add(ttft)
            traffic.ttft_ms.add(ttft)
            traffic.recent_ttft_ms.add(ttft)
        self._stats.generated_tokens += 1
        traffic.generated_tokens += 1
        try:
            text = generation.accept(outcome)
            response = state.response(now) if generation.finish_reason is not None and state.done else None
        except GenerationError as error:
            return self.fail(state, error)
        except Exception as error:  # a tokenizer is foreign code; whatever it raises fails this request only
            return self.fail(state, _tokenizer_failed(error))
        if generation.first_token_at is None:
            generation.first_token_at = now
        if text:
            generation.sequence.text_pending = False
        if generation.finish_reason is not None:
            self._scheduler.finish(generation.sequence)
            if generation.sampling.generated > 1:
                tpot = (now - generation.first_token_at) / (generation.sampling.generated - 1) * 1e3
                self._stats.tpot_ms.add(tpot)
                traffic.tpot_ms.add(tpot)
                traffic.recent_tpot_ms.add(tpot)
        if response is not None:
            self._complete(state, response)
        elif not state.streams:
            return None
        tokens = (outcome.token,)
        request_id, reason = state.request.request_id, generation.finish_reason
        return StreamEvent(request_id, generation.index, text, tokens, reason, response, generation.last_logprobs)

    def _deliver_forced(self, sequence: Sequence, now: float) -> None:
        """Deliver the tokens that a grammar leaves no choice about: known now, and computed in the next step."""
        generation = self.generations.get(sequence.ordinal)
        if generation is None or generation.matcher is None:
            return
        sequence.forced = 0
        for token in generation.forced():
            generation.forced_tokens += 1
            event = self._deliver_token(generation, Sampled(token), now)
            if event is not None:
                self.events.append(event)
            self._stats.forced_tokens += 1
            if generation.finish_reason is not None:
                break
            sequence.forced += 1

    def _complete(self, state: RequestState, response: InferenceResponse) -> None:
        if self.meter is not None:
            self.meter.answered(state)
        self._forget(state)
        self._stats.latency_ms.add(response.latency_ms)
        self._stats.traffic[state.request.traffic].completed += 1
        self._answer(state.request, response)

    def _answer(self, request: InferenceRequest, response: InferenceResponse) -> None:
        if request.callback is not None:
            self._callbacks.append((request.callback, response))

    def _forget(self, state: RequestState) -> None:
        del self.requests[state.request.request_id]
        for generation in state.generations:
            self._stats.prompt_tokens += state.prompt_tokens
            self._stats.cached_tokens += generation.sequence.num_cached
            del self.generations[generation.sequence.ordinal]


def _tokenizer_failed(cause: Exception) -> GenerationError:
    error = GenerationError(f"the tokenizer failed on the output: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
