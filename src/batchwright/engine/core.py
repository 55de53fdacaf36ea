"""The token-level loop: plan a step, run the model, choose tokens, deliver them.

Single-threaded and without locks: the owner of the core calls `add`, `cancel` and `step`. `Engine` owns one directly,
`AsyncEngine` on a thread of its own.
"""

from __future__ import annotations

import logging
import math

import torch

from batchwright.clock import Clock
from batchwright.engine.bodies import ModelBody
from batchwright.engine.delivery import Delivery
from batchwright.engine.engine_stats import EngineStats, UnfinishedWork
from batchwright.engine.generation import Generation, RequestState
from batchwright.engine.grammars import Form, GrammarDrafter, Grammars
from batchwright.engine.sampling import Sampled
from batchwright.engine.scoring import PromptScores
from batchwright.engine.step.launched import LaunchedStep
from batchwright.engine.step.launcher import StepLauncher
from batchwright.engine.step.multi_step import DecodedStep, Interruption
from batchwright.engine.tokenizer import Tokenizer
from batchwright.engine.work_meter import WorkMeter
from batchwright.errors import (
    BatchwrightError,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    GenerationError,
    InvalidRequest,
    OutOfMemory,
)
from batchwright.out_of_memory import ran_out_of_memory
from batchwright.request import InferenceRequest, StreamEvent
from batchwright.scheduling import Drafter, EndedAnswersByOwner, Scheduler, Sequence, StepPlan, repeated

_log = logging.getLogger(__name__)

_LONGEST_PAUSE = 0.01
_CALLS_OF_SUCCESSOR = 2
"""Calls of `step` for which to expect a successor to a request that ended: its caller may need a few turns."""


class EngineCore:
    """Step-by-step computation of requests. The blocks of `scheduler` must be those that `body` has allocated."""

    def __init__(
        self,
        body: ModelBody,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        clock: Clock,
        *,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: those for `tokenizer`, if they are being read already."""
        self.body = body
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.clock = clock
        self.max_model_len = max_model_len
        self.grammars = grammars or Grammars(tokenizer, body.vocab_size)
        """Compiled forms of answers. Any thread may use it."""
        self.stats = EngineStats(
            implementation=body.description,
            max_num_seqs=scheduler.max_num_seqs,
            kv_blocks=scheduler.blocks.num_blocks,
            block_size=scheduler.blocks.block_size,
        )
        self._delivery = Delivery(scheduler, clock, self.stats)
        self.launcher = StepLauncher(body, scheduler, self._delivery.generations, clock, self.stats)
        self._ended_answers = EndedAnswersByOwner()
        self.interruption = Interruption()
        """Signal that ends a run of steps after the step that is being computed."""
        self._calls_since_end = _CALLS_OF_SUCCESSOR
        """Calls of `step` since the last one in which a request ended."""
        self._launched: LaunchedStep | None = None
        """Step that was launched ahead. Its plan is not committed yet."""
        self._left_at: float | None = None
        """When the last step was done, if there was work left."""
        self._known_at = self._done_at = -math.inf
        """When the tokens of the last step were known, and when all of them had been delivered."""

    @property
    def meter(self) -> WorkMeter | None:
        """The meter of steps and of the work that answers needed, if there is one."""
        return self._delivery.meter

    @meter.setter
    def meter(self, meter: WorkMeter | None) -> None:
        self._delivery.meter = meter

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._delivery.requests)

    @property
    def unfinished_sequences(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._delivery.generations)

    def unfinished_work(self, prefix: str = "") -> UnfinishedWork:
        """Return what is left of the requests whose ids begin with `prefix`."""
        sequences = [
            each.sequence
            for each in self._delivery.generations.values()
            if each.owner.request.request_id.startswith(prefix)
        ]
        computed = sum(min(each.num_prompt, each.num_computed) - each.num_cached for each in sequences)
        left = sum(max(0, each.num_prompt - each.num_computed) for each in sequences)
        # A request that is only scored counts as an answer of one token, which costs about as much.
        answers = [(len(each.tokens) - each.num_prompt, max(1, each.max_total - each.num_prompt)) for each in sequences]
        return UnfinishedWork(answers, max(0, computed), left)

    def add(
        self,
        request: InferenceRequest,
        *,
        stream: bool = False,
        submitted_at: float | None = None,
        scores: PromptScores | None = None,
        form: Form | None = None,
    ) -> None:
        """Queue a request. With `stream`, every step returns an event with its new text.

        `submitted_at` is the time of its submission by the engine's clock, earlier than now if a step was in between.
        `scores` receives the scores of its prompt, and overrides what the request says of them. `form` is the form of
        its answers, if it is compiled already; otherwise it is compiled now.
        Raises `InvalidRequest`, and leaves no state behind, for a request that can never be computed.
        """
        if request.request_id in self._delivery.requests:
            raise InvalidRequest(
                f"request_id={request.request_id!r} is being computed already: give each request its own",
                param="request_id",
            )
        prompt = self._encode(request)
        if form is None and (constraint := request.constraint) is not None:
            form = self.grammars.form(constraint)
        matchers = [None if form is None else form.matcher() for _ in range(request.n)]
        since = self.clock.now() if submitted_at is None else submitted_at
        state = RequestState(request, len(prompt), since, stream)
        deadline = math.inf if request.deadline is None else since + request.deadline
        state.scores = scores
        if scores is None and request.prompt_logprobs is not None:
            state.scores = PromptScores(prompt, request.prompt_logprobs, request.prompt_logprobs_start, self.tokenizer)
        computed = prompt[: _computed(len(prompt), request)]
        for index, matcher in enumerate(matchers):
            sequence = Sequence(
                tokens=list(computed),
                num_prompt=len(computed),
                max_total=len(computed) + request.max_tokens,
                scored=range(0) if state.scores is None or index else state.scores.rows,
                priority=request.priority,
                deadline=deadline,
                arrived_at=since,
                traffic=request.traffic,
                flow=request.flow,
                text_pending=stream,
            )
            generation = Generation(state, index, sequence, self.tokenizer, incremental=stream, matcher=matcher)
            if self.scheduler.draft_rows and generation.sampling.follows_from_logits:
                ended = self._ended_answers.of(request.flow)
                sequence.drafter = Drafter(ended) if matcher is None else GrammarDrafter(matcher, ended)
            state.generations.append(generation)
        # Nothing raises from here on: `_encode` has checked the request with the scheduler.
        for generation in state.generations:
            self.scheduler.add(generation.sequence)
        self._delivery.expect(state)
        self.stats.traffic[request.traffic].submitted += 1
        self._gauge()

    def cancel(self, request_id: str) -> StreamEvent | None:
        """End a request now and free its slot and blocks. Returns None if there is no such request."""
        state = self._delivery.requests.get(request_id)
        if state is None:
            return None
        event = self._delivery.fail(state, Cancelled(f"request {request_id} was cancelled"), reason="cancelled")
        self._drop_launched()
        self._gauge()
        self._delivery.call_back()
        return event

    def close(self) -> list[StreamEvent]:
        """End all requests with `EngineClosed`; return all events that the caller does not have yet."""
        self._delivery.end_all("the engine was closed before the request was finished")
        self._drop_launched()
        self._gauge()
        self._delivery.call_back()
        return self.take_events()

    def take_events(self) -> list[StreamEvent]:
        """Return the events of a step that was interrupted, which the next one would return."""
        return self._delivery.take_events()

    def step(self, most: int = 1, *, expects_successors: bool = False) -> list[StreamEvent]:
        """Compute one step; return the events of streaming requests, and the last event of each request that ended.

        Up to `most` steps are computed, as long as the next ones are known to be alike whatever tokens are chosen, and
        `interruption` is not set. `expects_successors`: whether a request that ended is likely to be followed
        by one whose caller waits for this call, and so cannot set it: single steps are computed until that has
        had time to come.
        """
        expects_successor = expects_successors and self._calls_since_end < _CALLS_OF_SUCCESSOR
        self._step(1 if expects_successor and self.scheduler.has_free_place else most)
        self._drop_launched()
        self._gauge()
        events = self.take_events()
        try:
            self._delivery.call_back()
            if self.meter is not None:
                self.meter.between_steps()
            self._left_at = self.clock.now() if self.scheduler.has_work else None
            ended = any(event.response is not None for event in events)
            self._calls_since_end = 0 if ended else self._calls_since_end + 1
        except BaseException:  # an interrupt
            self._delivery.events[:0] = events
            raise
        return events

    @torch.inference_mode()
    def _step(self, most: int) -> None:
        entered = self.clock.now()
        step, pause = self._take_launched(), 0.0
        if step is None:
            pause = 0.0 if self._left_at is None else entered - self._left_at
            plan = self._plan(entered)
            if not plan.chunks:
                return
            try:
                several = self.launcher.compute_several(plan, entered, most, self.interruption, self.meter)
                step = None if several else self.launcher.launch(plan, entered, self.meter)
            except BaseException as failure:
                self.scheduler.rollback(plan)  # after an interrupt, too, so that the engine can go on
                if not isinstance(failure, Exception):
                    raise
                self._recover(plan, failure)
                return
            pause = pause if pause < _LONGEST_PAUSE else 0.0
            if step is None:
                self._note_blocks()
                self._deliver_several(plan, several, entered, pause)
                return
        elif entered - self._done_at > _LONGEST_PAUSE:
            self._known_at = self._done_at = entered  # the caller did something else meanwhile
        try:
            self._launch_next(step)
            try:
                outcomes = self.launcher.outcomes(step, self._launched)
            except Exception as failure:
                self._undo(step)
                self._recover(step.plan, failure)
                return
            self._deliver_step(step, outcomes, pause)
        except BaseException:  # an interrupt: tokens that were not delivered are chosen again
            self._undo(step)
            raise

    def _plan(self, now: float, before: LaunchedStep | None = None) -> StepPlan:
        """Plan a step, and end the requests whose deadline has passed. `before`: the step that is being computed."""
        plan = self.scheduler.schedule(now)
        for late in plan.expired:
            expired = self._delivery.generations.get(late.ordinal)
            if expired is not None:  # otherwise another completion of the same request has just ended it
                if before is not None:
                    before.drop_unknown([generation.sequence for generation in expired.owner.generations])
                seconds = expired.owner.request.deadline
                error = DeadlineExceeded(f"deadline={seconds} s passed before the request was finished")
                self._delivery.events.append(self._delivery.fail(expired.owner, error))
        self._note_blocks()
        self.stats.preemptions += len(plan.preempted)
        for sequence in plan.preempted:
            self.stats.traffic[sequence.traffic].preemptions += 1
        return plan

    def _take_launched(self) -> LaunchedStep | None:
        """Return the step that was launched ahead, if there is one that is still useful."""
        self._drop_launched()
        step, self._launched = self._launched, None
        return step

    def _drop_launched(self) -> None:
        """Drop the step that was launched ahead if all of its sequences have ended since."""
        step = self._launched
        unfinished = self._delivery.generations
        if step is not None and not any(chunk.sequence.ordinal in unfinished for chunk in step.plan.chunks):
            self.scheduler.commit(step.plan)
            self._launched = None

    def _launch_next(self, step: LaunchedStep) -> None:
        """Launch the step after `step`, whose tokens may be known only to the device yet, unless it has to wait.

        Its work is wasted for sequences whose end could not be foreseen. `step` is committed, since only one plan may
        be open.
        """
        if step.pending is None or step.plan.alone or self.scheduler.isolates:
            return
        step.committed = True
        self.scheduler.commit(step.plan)
        step.reserve_tokens()
        began = self.clock.now()
        plan = self._plan(began, step)
        if not plan.chunks:
            return
        try:
            self._launched = self.launcher.launch(plan, began, self.meter, step)
        except BaseException as failure:
            self.scheduler.rollback(plan)
            if not isinstance(failure, Exception):
                raise
            # It is retried as a step of its own, whose failure affects nothing else.
            _log.warning("a step could not be launched ahead: %s: %s", type(failure).__name__, failure)

    def _deliver_step(self, step: LaunchedStep, outcomes: list[list[Sampled]], pause: float) -> None:
        """Deliver the tokens of a step that began `pause` seconds after the end of the one before."""
        computing_since, began = max(step.computing_since, self._known_at), max(step.began, self._done_at)
        now = self._known_at = self.clock.now()
        if not step.committed:
            step.committed = True
            self.scheduler.commit(step.plan)
        step.drop_unknown()
        self._delivery.settle_all(step.plan, now)
        for chunk, chosen in zip(step.sampled, outcomes, strict=True):
            if step.is_valid(chunk):
                self._delivery.deliver(chunk, chosen, now)
        self._done_at = self.clock.now()
        self._count(step.plan, now - computing_since, self._done_at - began, pause)

    def _deliver_several(self, plan: StepPlan, steps: list[DecodedStep], began: float, pause: float) -> None:
        """Deliver the tokens of steps, of which the first is `plan`, made at `began`, and the others repeat it."""
        now = self._known_at = self.clock.now()
        before = now
        of_host = max(0.0, now - began - sum(step.seconds for step in steps)) / len(steps)
        for number, step in enumerate(steps):
            if number:
                plan, pause = repeated(plan), 0.0
            try:
                self.scheduler.commit(plan)
                for chunk, token in zip(plan.chunks, step.tokens, strict=True):
                    self._delivery.deliver(chunk, [Sampled(token)], now)
            except BaseException:  # an interrupt: tokens that were not delivered are chosen again
                for chunk in plan.chunks:
                    self.scheduler.repeat_last(chunk.sequence)
                raise
            self._done_at = self.clock.now()
            self._count(plan, step.seconds, step.seconds + of_host + self._done_at - before, pause)
            before = self._done_at

    def _undo(self, step: LaunchedStep) -> None:
        """Undo what was launched after `step`, and have tokens that were not delivered chosen again.

        May be called repeatedly, and after an interrupt at any point.
        """
        following, self._launched = self._launched, None
        if following is not None:
            self.scheduler.rollback(following.plan)
        step.drop_unknown()
        if not step.committed:
            self.scheduler.rollback(step.plan)
            return
        for chunk in step.plan.chunks:  # the other chunks have more to compute
            self.scheduler.repeat_last(chunk.sequence)

    def _encode(self, request: InferenceRequest) -> list[int]:
        try:
            prompt = self.tokenizer.encode(request.prompt)
        except BatchwrightError:
            raise
        except Exception as error:  # a tokenizer is foreign code; whatever it raises fails this request only
            raise InvalidRequest(f"the tokenizer refuses the prompt: {error}", param="prompt") from error
        computed = _computed(len(prompt), request)
        if computed + request.max_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens and max_tokens={request.max_tokens} exceed the context of "
                f"{self.max_model_len} tokens: shorten the prompt or lower max_tokens"
            )
        for token in (*request.stop_token_ids, *request.logit_bias):
            if token >= self.body.vocab_size:
                raise InvalidRequest(
                    f"token id {token} in stop_token_ids or logit_bias: the model has ids 0 to "
                    f"{self.body.vocab_size - 1}",
                    param="stop_token_ids" if token in request.stop_token_ids else "logit_bias",
                )
        if reason := self.scheduler.refusal(computed, request.max_tokens):
            raise ContextLengthExceeded(reason)
        return prompt

    def _recover(self, plan: StepPlan, error: Exception) -> None:
        """Retry a step that raised and was undone, in smaller steps or one by one; fail only the request at fault.

        All requests fail if the body can compute nothing any more, in which case it raises `EngineClosed`.
        """
        if isinstance(error, EngineClosed):
            self._delivery.end_all(str(error))
            return
        if ran_out_of_memory(error):
            if self.body.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.scheduler.shrink(plan):
                return
            failure: BatchwrightError = OutOfMemory(f"out of memory with one sequence in the step: {error}")
        elif len(plan.chunks) > 1:
            self.scheduler.isolate([chunk.sequence for chunk in plan.chunks])
            return
        else:
            failure = GenerationError(f"the model failed on this request: {type(error).__name__}: {error}")
        failure.__cause__ = error
        generation = self._delivery.generations.get(plan.chunks[0].sequence.ordinal) if plan.chunks else None
        if generation is not None:
            self._delivery.events.append(self._delivery.fail(generation.owner, failure))

    def _count(self, plan: StepPlan, model_seconds: float, step_seconds: float, pause: float) -> None:
        stats = self.stats
        decodes = 0
        for chunk in plan.chunks:
            if chunk.is_decode and chunk.start >= chunk.sequence.num_prompt:
                decodes += chunk.count
            else:
                stats.traffic[chunk.sequence.traffic].prefill_tokens += chunk.count
        total, of_batches = plan.num_tokens, plan.num_batch_tokens
        stats.last_step_seconds = step_seconds
        stats.last_step_predicted = self.scheduler.measured(plan, step_seconds, pause)
        stats.step_margin = self.scheduler.slo.times.margin
        stats.traffic["batch"].computed_tokens += of_batches
        stats.traffic["online"].computed_tokens += total - of_batches
        stats.steps += 1
        stats.decode_tokens += decodes
        stats.prefill_tokens += total - decodes
        stats.rows_computed += self.body.rows_for(plan.num_rows)
        stats.decode_seconds += model_seconds * decodes / total
        stats.prefill_seconds += model_seconds * (total - decodes) / total
        stats.model_seconds += model_seconds
        stats.step_seconds += step_seconds
        stats.occupancy_sum += len(plan.chunks)
        stats.occupancy_peak = max(stats.occupancy_peak, len(plan.chunks))

    def _note_blocks(self) -> None:
        """Note the blocks in use before a step ends sequences, whose blocks are free then."""
        self.stats.kv_blocks_peak = max(self.stats.kv_blocks_peak, self.scheduler.blocks.num_used)

    def _gauge(self) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.kv_blocks_used = scheduler.blocks.num_used
        for name, traffic in stats.traffic.items():
            traffic.waiting = scheduler.waiting_of(name)
            traffic.running = scheduler.running_of(name)


def _computed(length: int, request: InferenceRequest) -> int:
    """Return how many tokens of a prompt of this length are computed: what follows the last one may not be wanted."""
    return max(1, length - (request.max_tokens == 0))
