"""The token-level scheduler: one budget of tokens a step, no prefill phase and no decode phase.

A step is planned in this order, each part by urgency (priority, then deadline, then arrival):

1. waiting sequences of a higher priority than a running one are admitted, at the cost of lower ones where they must;
2. every running sequence that lacks only its last token gets it (a decode);
3. running sequences that lack more get a chunk of it;
4. waiting sequences are admitted, with their cached prefix, while slots, blocks and budget last.

An admitted sequence gets the blocks of all its known tokens at once, so only a decode can lack one. Then the least
urgent running sequence is preempted: its blocks are freed and its tokens computed again later, many of them from the
prefix cache. The most urgent sequence is never preempted, so something always ends. All preemption comes before the
first block of the step is published, so nobody shares a block that this step drops.

Nothing waits for ever: a sequence that arrived `promote_after` seconds ago goes before all priorities, and such
sequences are served in order of arrival.

The scheduler is a state machine without a clock: `schedule(now)` plans, then exactly one of `commit(plan)` (the step
was computed) or `rollback(plan)` (it was not) must follow.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from batchwright.errors import ContextLengthExceeded, InvalidRequest
from batchwright.kv import BlockManager
from batchwright.scheduling.sequence import Sequence, Status, Urgency

_STEPS_BEFORE_REGROWTH = 64
_ENDED_KEPT = 64
"""Entries of ended sequences that a queue may hold beside twice those that it needs."""


@dataclass(slots=True)
class Chunk:
    """`count` tokens of `sequence`, from position `start`, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int
    fresh: bool
    """Its first chunk since it was admitted, as a rule by this plan."""

    samples: bool
    """It reaches the last known token, whose logits choose the next one."""


@dataclass(slots=True)
class StepPlan:
    """What the next step computes. `expired` sequences have ended: their deadline passed."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Plans steps of at most `max_batch_tokens` tokens over at most `max_num_seqs` sequences.

    `promote_after` is in the unit of `now`; None turns promotion off. Raises ValueError for limits below 1.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        promote_after: float | None = 60.0,
    ) -> None:
        if max_batch_tokens < 1 or max_num_seqs < 1:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens}, max_num_seqs={max_num_seqs}: both must be at least 1"
            )
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.promote_after = promote_after
        self.token_budget = max_batch_tokens
        """Tokens a step may have now: `max_batch_tokens`, less after `shrink`."""
        self.running: list[Sequence] = []
        """By urgency."""
        self._waiting: list[tuple[Urgency, int, Sequence]] = []
        self._entries = 0
        self._num_waiting = 0
        self._arrivals: deque[Sequence] = deque()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._isolated: deque[Sequence] = deque()
        self._ordinal = 0
        self._steps_since_shrink = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._num_waiting)

    def refusal(self, num_prompt: int, max_tokens: int) -> str | None:
        """Why a sequence of this size could never be computed, or None if it can."""
        needed = self.blocks.blocks_for(num_prompt + max_tokens)
        if needed <= self.blocks.num_blocks:
            return None
        capacity = self.blocks.num_blocks * self.blocks.block_size
        return (
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} need {num_prompt + max_tokens} tokens of KV "
            f"cache, which holds {capacity}: lower max_tokens, shorten the prompt or raise kv_memory"
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises `InvalidRequest` when it has no tokens, `ContextLengthExceeded` when it could never be computed.
        """
        if not sequence.tokens:
            raise InvalidRequest("the prompt has no tokens: give at least one", param="prompt")
        if reason := self.refusal(sequence.num_prompt, sequence.max_total - sequence.num_prompt):
            raise ContextLengthExceeded(reason)
        sequence.ordinal = self._ordinal
        self._ordinal += 1
        if self.promote_after is not None:
            self._arrivals.append(sequence)
        if sequence.deadline < math.inf:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.ordinal, sequence))
        self._enqueue(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever its state: done, failed or cancelled. Ending it again changes nothing.

        It may be called between a plan and its commit or rollback.
        """
        if sequence.status is Status.RUNNING:
            # What a step that may yet fail was to write is nothing to share.
            self.blocks.retract(sequence.table, sequence.num_computed)
            self._drop(sequence)
        elif sequence.status is Status.WAITING and sequence.queue_entry >= 0:
            self._num_waiting -= 1
        sequence.status = Status.FINISHED
        self._sweep()

    def schedule(self, now: float) -> StepPlan:
        """Plan one step. A plan without chunks means that there is nothing to do."""
        plan = StepPlan()
        self._expire(now, plan)
        self._promote(now)
        alone = self._next_isolated()
        if alone is not None:
            self._plan_alone(alone, plan)
            return plan
        self._place_urgent(plan)
        budget = self._plan_decodes(plan, self.token_budget)
        budget = self._plan_chunks(plan, budget)
        self._admit(plan, budget)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The step was computed: its tokens are now computed tokens."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.status is Status.RUNNING:
                sequence.started = True
                sequence.num_computed = chunk.start + chunk.count
                if sequence.num_computed % self.blocks.block_size == 0:
                    self.blocks.publish(sequence.table, sequence.tokens, sequence.num_computed)
        if self.token_budget < self.max_batch_tokens:
            self._steps_since_shrink += 1
            if self._steps_since_shrink >= _STEPS_BEFORE_REGROWTH:
                self.token_budget = min(self.max_batch_tokens, self.token_budget * 2)
                self._steps_since_shrink = 0

    def rollback(self, plan: StepPlan) -> None:
        """The step was not computed: take back what was offered to others, send new sequences back to the queue."""
        for chunk in plan.chunks:
            if chunk.sequence.status is Status.RUNNING:
                self.blocks.retract(chunk.sequence.table, chunk.start)
        for chunk in plan.chunks:
            if chunk.fresh and chunk.sequence.status is Status.RUNNING:
                self._requeue(chunk.sequence)

    def repeat_last(self, sequence: Sequence) -> None:
        """Compute the last known token once more: the token that was to follow it got lost after `commit`."""
        if sequence.status is Status.RUNNING and sequence.remaining == 0:
            sequence.num_computed -= 1

    def shrink(self, failed: StepPlan) -> bool:
        """After a step ran out of memory: plan smaller ones for a while. False when the step could not be smaller."""
        tokens = failed.num_tokens
        if tokens <= 1:
            return False
        self.token_budget = max(1, tokens // 2)
        self._steps_since_shrink = 0
        return True

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """Compute each of these alone for one step, to find out which of them makes a step fail."""
        self._isolated.extend(sequences)

    def forget(self, sequence: Sequence) -> None:
        """Withdraw all that a running sequence offered to the prefix cache: its contents cannot be trusted.

        Called before `finish`, which must follow before the next commit (that would offer them again).
        """
        if sequence.status is Status.RUNNING:
            self.blocks.retract(sequence.table, 0)

    def _expire(self, now: float, plan: StepPlan) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.status is not Status.FINISHED:
                self.finish(sequence)
                plan.expired.append(sequence)

    def _promote(self, now: float) -> None:
        if self.promote_after is None:
            return
        # No more at once than could be admitted: a long queue that comes of age together holds up no step.
        promoted = 0
        while self._arrivals and promoted < self.max_num_seqs:
            oldest = self._arrivals[0]
            if oldest.status is not Status.FINISHED:
                if now - oldest.arrived_at < self.promote_after:
                    break
                promoted += 1
                oldest.promoted = True
                if oldest.status is Status.WAITING:
                    self._push(oldest)
            self._arrivals.popleft()
        if promoted:
            self.running.sort(key=_urgency)

    def _next_isolated(self) -> Sequence | None:
        while self._isolated:
            sequence = self._isolated.popleft()
            if sequence.status is not Status.FINISHED:
                return sequence
        return None

    def _plan_alone(self, sequence: Sequence, plan: StepPlan) -> None:
        if sequence.status is Status.WAITING:
            # It fits once nobody else runs, or `refusal` would not have let it in.
            while self.running and not (
                len(self.running) < self.max_num_seqs and self.blocks.can_open(sequence.tokens)
            ):
                self._preempt(self.running[-1], plan)
            self._place(sequence)
        count = min(sequence.remaining, self.token_budget)
        while not self.blocks.grow(sequence.table, sequence.num_computed + count):
            self._preempt(self.running[-1 if self.running[-1] is not sequence else -2], plan)
        self._plan(sequence, count, plan)

    def _place_urgent(self, plan: StepPlan) -> None:
        claimed = 0
        while self.running and (urgent := self._peek_waiting()) is not None:
            if _class(urgent) >= _class(self.running[-1]):
                return
            if claimed and claimed + len(self.running) >= self.token_budget:
                return
            if not self._fits(urgent) and not self._clear_for(urgent, plan):
                return
            self._place(urgent)
            claimed += urgent.remaining

    def _clear_for(self, urgent: Sequence, plan: StepPlan) -> bool:
        """Preempt as many of a lower class as it takes. False, and nobody preempted, when all would not be enough."""
        lower = [other.table for other in self.running if _class(other) > _class(urgent)]
        others = len(self.running) - len(lower)
        if others >= self._slots or not self.blocks.can_open(urgent.tokens, spare=others, without=lower):
            return False
        while not self._fits(urgent):
            self._preempt(self.running[-1], plan)
        return True

    def _plan_decodes(self, plan: StepPlan, budget: int) -> int:
        size = self.blocks.block_size
        for sequence in list(self.running):
            if budget < 1:
                break
            if sequence.remaining != 1 or sequence.status is not Status.RUNNING:
                continue
            if sequence.num_computed >= len(sequence.table) * size and not self._make_room(sequence, plan):
                continue
            plan.chunks.append(Chunk(sequence, sequence.num_computed, 1, not sequence.started, samples=True))
            budget -= 1
        return budget

    def _plan_chunks(self, plan: StepPlan, budget: int) -> int:
        for sequence in self.running:
            if budget < 1:
                break
            if sequence.remaining > 1:
                count = min(sequence.remaining, budget)
                self._plan(sequence, count, plan)
                budget -= count
        return budget

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while budget > 0 and (sequence := self._peek_waiting()) is not None and self._fits(sequence):
            if sequence in plan.preempted:
                return
            self._place(sequence)
            count = min(sequence.remaining, budget)
            self._plan(sequence, count, plan)
            budget -= count

    @property
    def _slots(self) -> int:
        # A sequence beyond the budget would hold blocks for nothing, and decodes would leave prompts no tokens.
        return min(self.max_num_seqs, self.token_budget)

    def _fits(self, sequence: Sequence) -> bool:
        if len(self.running) >= self._slots:
            return False
        # One block to spare for each running sequence keeps a newcomer from being preempted in its first steps.
        return self.blocks.can_open(sequence.tokens, spare=len(self.running))

    def _place(self, sequence: Sequence) -> None:
        """From the queue to the running ones, with its cached prefix and blocks for all its tokens."""
        sequence.table, sequence.num_computed = self.blocks.open(sequence.tokens)
        if not self.blocks.grow(sequence.table, len(sequence.tokens)):
            raise RuntimeError("a sequence was admitted without room for its tokens")
        if not sequence.admitted:
            sequence.admitted = True
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        self._num_waiting -= 1
        sequence.status = Status.RUNNING
        sequence.started = False
        insort(self.running, sequence, key=_urgency)

    def _plan(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        start = sequence.num_computed
        samples = start + count == len(sequence.tokens)
        plan.chunks.append(Chunk(sequence, start, count, not sequence.started, samples))
        if count > 1:
            self.blocks.publish(sequence.table, sequence.tokens, start + count)

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """A block for one more token, at the cost of the least urgent sequence, which may be this one."""
        while not self.blocks.grow(sequence.table, sequence.num_computed + 1):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        plan.preempted.append(victim)
        victim.preemptions += 1
        self._requeue(victim)

    def _requeue(self, sequence: Sequence) -> None:
        self._drop(sequence)
        sequence.num_computed = 0
        self._enqueue(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.close(sequence.table)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._num_waiting += 1
        self._push(sequence)

    def _push(self, sequence: Sequence) -> None:
        """Enter it under its present urgency; an older entry of it is void from now on."""
        self._entries += 1
        sequence.queue_entry = self._entries
        heapq.heappush(self._waiting, (sequence.urgency, self._entries, sequence))

    def _peek_waiting(self) -> Sequence | None:
        while self._waiting:
            if _is_valid(self._waiting[0]):
                return self._waiting[0][2]
            heapq.heappop(self._waiting)
        return None

    def _sweep(self) -> None:
        """Let go of ended sequences that lie deep in a queue, once they are most of it."""
        most = 2 * (self._num_waiting + len(self.running)) + _ENDED_KEPT
        if len(self._waiting) > most:
            self._waiting = [entry for entry in self._waiting if _is_valid(entry)]
            heapq.heapify(self._waiting)
        if len(self._deadlines) > most:
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._deadlines)
        if len(self._arrivals) > most:
            self._arrivals = deque(each for each in self._arrivals if each.status is not Status.FINISHED)


def _is_valid(entry: tuple[Urgency, int, Sequence]) -> bool:
    _, serial, sequence = entry
    return sequence.status is Status.WAITING and serial == sequence.queue_entry


def _urgency(sequence: Sequence) -> Urgency:
    return sequence.urgency


def _class(sequence: Sequence) -> tuple[bool, int]:
    return sequence.urgency[:2]
