"""The token-level scheduler: one budget of tokens per step, without separate prefill and decode phases.

Online sequences are planned first, then those of batches, each class of traffic in the following order, and each part
by urgency (priority, then deadline, then arrival):

1. waiting sequences of a higher priority than a running one are admitted, at the cost of lower ones if necessary;
2. every running sequence that lacks only its last token gets it (a decode), with tokens that are certain to follow it;
3. running sequences that lack more get a chunk of it;
4. waiting sequences are admitted, with their cached prefix, while slots, blocks and budget last: an online one at the
   cost of batch ones if necessary.

So batches fill what online traffic leaves of a step, and an online sequence never waits for a batch longer than the
current step. What is left may be less than the budget: `SloController` sets how much time a step may take. If it is
less than the decodes of batches, those that have gone without a token for longest go first; the others keep their
blocks meanwhile. `BatchShare` is the one exception: the tokens that it owes to batches go to them first.

`places.py` decides which sequences are admitted, and which give up a place or blocks for others. If there are sequences
of several requests with a `Flow`, `fairness.py` influences all of this: who gets the next place and prompt tokens, who
gives up a place, and which decodes go along with the prompt of a newcomer.

Within its class nothing waits forever: a sequence that arrived `promote_after` seconds ago goes before all priorities,
and such sequences are served in order of arrival.

The scheduler is a state machine without a clock: `schedule(now)` plans, then exactly one of `commit(plan)` (the step
was computed) or `rollback(plan)` (it was not) must follow. A step may be committed while it is still being computed, in
order to plan the next one: the tokens that it chooses already have placeholders in `tokens`, and those that will be the
last of their sequences are not appended, so that nothing is planned for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from batchwright.errors import ContextLengthExceeded, InvalidRequest
from batchwright.kv import BlockManager
from batchwright.request import Traffic
from batchwright.scheduling import fairness
from batchwright.scheduling.fairness import Precedence
from batchwright.scheduling.places import Places
from batchwright.scheduling.plan import Chunk, StepPlan, add_drafts
from batchwright.scheduling.sequence import Sequence, Status
from batchwright.scheduling.slo import BatchShare, SloController, StepRoom, StepShape
from batchwright.scheduling.step_costs import StepRecord
from batchwright.scheduling.timetable import Timetable

_STEPS_BEFORE_REGROWTH = 64
_STEPS_IN_COMPANY = 256
"""Number of steps, after there were several requests together, for which another one is expected at any time."""


def kv_refusal(num_prompt: int, max_tokens: int, capacity: int) -> str | None:
    """Return why a sequence of this size could never be computed with `capacity` tokens of KV cache, or None."""
    if num_prompt + max_tokens <= capacity:
        return None
    return (
        f"{num_prompt} prompt tokens and max_tokens={max_tokens} need {num_prompt + max_tokens} tokens of KV "
        f"cache, which holds {capacity}: lower max_tokens, shorten the prompt or raise kv_memory"
    )


class Scheduler:
    """Plans steps of at most `max_batch_tokens` tokens over at most `max_num_seqs` sequences.

    `promote_after` is in the unit of `now`; None turns promotion off. `batch_share` is the share of all tokens that
    batches get regardless of online traffic, 0 ≤ share < 1, as far as that share of the places (at least one) suffices.
    Steps of fewer than `draft_rows` tokens are filled up to it with drafts. `slo` limits the time of steps; without it,
    there is no limit. `max_scored` is the most tokens of a step whose logits are wanted for the known tokens that
    follow them. Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_num_seqs: int,
        promote_after: float | None = 60.0,
        batch_share: float = 0.0,
        draft_rows: int = 0,
        slo: SloController | None = None,
        max_scored: int = 512,
    ) -> None:
        if max_batch_tokens < 1 or max_num_seqs < 1 or max_scored < 1:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens}, max_num_seqs={max_num_seqs}, max_scored={max_scored}: each must "
                "be at least 1"
            )
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self.draft_rows = draft_rows
        self.max_scored = max_scored
        self.slo = slo or SloController()
        self.record = StepRecord()
        """Measured times of the steps."""
        self.token_budget = max_batch_tokens
        """Tokens that a step may have now: `max_batch_tokens`, or less after `shrink`."""
        self._places = Places(blocks, max_num_seqs, promote_after)
        self._share = BatchShare(batch_share, max_batch_tokens)
        self._timetable = Timetable(promote_after)
        self._isolated: deque[Sequence] = deque()
        self._ordinal = 0
        self._turns = 0
        self._steps_since_shrink = 0
        self._steps_alone = _STEPS_IN_COMPANY
        """Steps since there were last online sequences of several requests."""

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have a place, by urgency, with online ones first."""
        return self._places.running

    @property
    def num_waiting(self) -> int:
        return self._places.num_waiting

    @property
    def has_free_place(self) -> bool:
        """Whether there is a free place for which no sequence waits."""
        return not self.num_waiting and len(self.running) < self.max_num_seqs

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting)

    def waiting_of(self, traffic: Traffic) -> int:
        """Return how many sequences of this class wait."""
        return len(self._places.waiting[traffic])

    def running_of(self, traffic: Traffic) -> int:
        """Return how many sequences of this class have a place."""
        return self._places.running_of(traffic)

    def refusal(self, num_prompt: int, max_tokens: int) -> str | None:
        """Return why a sequence of this size could never be computed, or None if it can."""
        return kv_refusal(num_prompt, max_tokens, self.blocks.num_blocks * self.blocks.block_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence.

        Raises `InvalidRequest` if it has no tokens, `ContextLengthExceeded` if it could never be computed.
        """
        if not sequence.tokens:
            raise InvalidRequest("the prompt has no tokens: give at least one", param="prompt")
        if reason := self.refusal(sequence.num_prompt, sequence.max_total - sequence.num_prompt):
            raise ContextLengthExceeded(reason)
        sequence.ordinal = self._ordinal
        self._ordinal += 1
        self._timetable.add(sequence)
        self._places.enter(sequence)

    def forget_answers(self) -> None:
        """Keep blocks of answers in the prefix cache no longer than needed: no prompt will begin with them."""
        self._places.keeps_answers = False

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever its state: done, failed or cancelled. Ending it again changes nothing.

        From then on other sequences may draft from its answer. May be called between a plan and its commit or rollback.
        """
        if sequence.drafter is not None and sequence.status is not Status.FINISHED:
            # All its tokens are known: no step is launched ahead while sequences draft.
            sequence.drafter.share(sequence.tokens, sequence.num_prompt)
        self._places.end(sequence)
        # Ended sequences deep in the timetable are removed once they are most of it.
        self._timetable.sweep(self.num_waiting + len(self.running))

    def schedule(self, now: float) -> StepPlan:
        """Plan one step. A plan without chunks means that there is nothing to do."""
        plan = StepPlan()
        self._places.begin(now, self.token_budget)
        self._expire(now, plan)
        self._promote(now)
        alone = self._next_isolated()
        if alone is not None:
            self._plan_alone(alone, plan)
            return plan
        if self.slo.tpot is not None:
            self._note_first_tokens(now)
        owed, closed = self._seat_owed()
        left = self._plan_online(plan, self.token_budget - owed, closed=closed) + owed
        if self._places.wants_batch:
            self._plan_batch(plan, self._room(now, plan, left, owed))
        if self.draft_rows:
            add_drafts(plan, self.blocks, self.draft_rows)
        return plan

    def reserve_steady_steps(self, plan: StepPlan, most: int) -> int:
        """Return how many steps, up to `most`, decode only the same sequences as `plan`, which is open.

        This many consecutive steps need no new plan, as long as none of the sequences ends before its last token,
        nothing arrives, and they end before `next_event`. Sequences get blocks for all of them.
        """
        sequences = [chunk.sequence for chunk in plan.chunks]
        is_steady = (
            plan.is_pure_decode
            and len(sequences) == len(self.running)
            and self.token_budget == self.max_batch_tokens
            # A sequence that waits for blocks rather than a place may find more of its prefix in the cache after any
            # step.
            and (not self.num_waiting or self._places.is_full)
            and not (self._isolated or self.slo.bounds_steps or self._places.contended or self._places.is_mixed)
            # Drafts may be found for the next step even if there were none for this one.
            and not (len(sequences) < self.draft_rows and any(each.drafter for each in sequences))
        )
        if not is_steady:
            return 1
        left = min(each.max_total - len(each.tokens) for each in sequences)
        return self._places.reserve(sequences, min(most, left))

    def next_event(self) -> float:
        """Return the time until which waiting changes nothing: no deadline passes, and no sequence is promoted."""
        return self._timetable.next_event()

    def commit(self, plan: StepPlan) -> None:
        """Count the tokens of a step that was computed as computed."""
        self._steps_alone += 1
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.status is Status.RUNNING:
                sequence.started = True
                self._turns += 1
                sequence.last_turn = self._turns
                sequence.num_computed = chunk.start + chunk.count
                if chunk.scored:
                    sequence.scored = range(chunk.scored.stop, sequence.scored.stop)
                self._publish_decoded(sequence)
        if self._share.share:
            self._share.settle(plan.num_tokens, plan.num_batch_tokens, wanted=self._places.wants_batch)
        if self.token_budget < self.max_batch_tokens:
            self._steps_since_shrink += 1
            if self._steps_since_shrink >= _STEPS_BEFORE_REGROWTH:
                self.token_budget = min(self.max_batch_tokens, self.token_budget * 2)
                self._steps_since_shrink = 0

    def accept_draft(self, sequence: Sequence) -> None:
        """Count the last known token as computed: it was a correct draft in the step that was just committed."""
        if sequence.status is Status.RUNNING:
            sequence.num_computed += 1
            self._publish_decoded(sequence)

    def measured(self, plan: StepPlan, seconds: float, pause: float = 0.0) -> float | None:
        """Learn that the step took `seconds`, and return the prediction for it, or None.

        `pause`: seconds between the end of the step before and its beginning, if there was work.
        """
        shape = StepShape.of(plan.chunks)
        self.record.add(shape, seconds + pause)
        return self.slo.observe(plan, shape, seconds)

    def rollback(self, plan: StepPlan) -> None:
        """Undo a step that was not computed: withdraw blocks offered to others, and requeue new sequences.

        A new sequence that got no chunk is requeued too: it may share blocks that were to be computed in the step.
        """
        for chunk in plan.chunks:
            if chunk.sequence.status is Status.RUNNING:
                self.blocks.retract(chunk.sequence.table, chunk.start)
        for sequence in [each for each in self.running if not each.started]:
            self._places.requeue(sequence)

    def repeat_last(self, sequence: Sequence) -> None:
        """Compute the last known token again, because the token that was to follow it was lost after `commit`."""
        if sequence.status is Status.RUNNING and sequence.remaining == 0:
            sequence.num_computed -= 1

    def shrink(self, failed: StepPlan) -> bool:
        """Plan smaller steps for a while, after one ran out of memory. False if the step could not be smaller."""
        tokens = failed.num_tokens
        if tokens <= 1:
            return False
        self.token_budget = max(1, tokens // 2)
        self._steps_since_shrink = 0
        return True

    def isolate(self, sequences: Iterable[Sequence]) -> None:
        """Compute each of these sequences alone for one step, to find out which one makes a step fail."""
        self._isolated.extend(sequences)

    @property
    def isolates(self) -> bool:
        """Whether the next step computes one sequence alone."""
        return bool(self._isolated)

    def forget(self, sequence: Sequence) -> None:
        """Withdraw everything that a running sequence offered to the prefix cache, since its contents cannot be
        trusted.

        Called before `finish`, which must follow before the next commit (that would offer them again).
        """
        if sequence.status is Status.RUNNING:
            self.blocks.retract(sequence.table, 0)

    def _expire(self, now: float, plan: StepPlan) -> None:
        while (sequence := self._timetable.next_expired(now)) is not None:
            self.finish(sequence)
            plan.expired.append(sequence)

    def _promote(self, now: float) -> None:
        of_age = iter(lambda: self._timetable.next_of_age(now), None)
        # No more at once than could be admitted: a long queue that reaches the age together must not hold up a step.
        self._places.promote(islice(of_age, self.max_num_seqs))

    def _note_first_tokens(self, now: float) -> None:
        for sequence in self._places.online:
            if sequence.first_token_at is None and sequence.num_generated:
                sequence.first_token_at = now

    def _next_isolated(self) -> Sequence | None:
        while self._isolated:
            sequence = self._isolated.popleft()
            if sequence.status is not Status.FINISHED:
                return sequence
        return None

    def _plan_alone(self, sequence: Sequence, plan: StepPlan) -> None:
        plan.alone = True
        if sequence.status is Status.WAITING:
            self._places.place_alone(sequence, plan)
        count = self._scorable(sequence, min(sequence.remaining, self.token_budget), plan)
        self._places.make_room_alone(sequence, count, plan)
        self._plan(sequence, count, plan)

    # Online

    def _plan_online(self, plan: StepPlan, budget: int, *, closed: bool) -> int:
        """Plan the online part of the step; return what it leaves of `budget`. `closed`: no sequence is admitted."""
        contended = self._places.shares["online"].contended
        if contended:
            self._steps_alone = 0
        if not closed:
            self._places.place_urgent("online", plan)
            if contended:
                self._places.place_fairly(plan, budget)
        online = self._places.online
        first = fairness.precedence(online, budget, self.slo) if contended else None
        decodes = fairness.decodes(online, first) if contended else online
        planned = self._plan_online_decodes(decodes, plan, budget)
        left = budget - planned
        # Beside newcomers the others' part is limited already; and batches would take what prompts leave.
        bounded = self._in_company and not self._places.wants_batch and (first is None or not first.has_heavier)
        budget = min(left, self._most_of_prompts(planned)) if bounded else left
        left -= budget
        # Nor should a step be much longer than the others.
        room = self.slo.even_room(budget) if bounded else StepRoom(budget)
        prompts = [each for each in self._places.online if not each.is_decode]
        if contended:
            prompts.sort(key=fairness.by_turn)
            if first is not None and prompts and first.must_defer(prompts[0]):
                first = None
        for sequence in prompts:
            self._plan_part(sequence, plan, room, first)
        if not closed:
            self._admit_online(plan, room, first)
        return left + room.tokens

    @property
    def _in_company(self) -> bool:
        """Whether another request may arrive in the middle of a step and have to wait for its end."""
        return self._places.shares["online"].named and self._steps_alone < _STEPS_IN_COMPANY

    def _most_of_prompts(self, decodes: int) -> int:
        """Tokens of online prompts that a step in company may have beside so many decodes: hardly more than half of
        those that it could have, which is a few percent slower.
        """
        return max(self.token_budget // 2 - decodes, self.token_budget // 8, 1)

    def _plan_online_decodes(self, decodes: list[Sequence], plan: StepPlan, budget: int) -> int:
        """Plan decodes as far as `budget` and blocks allow, and return the number of their tokens."""
        planned, left = set[int](), budget
        for sequence in decodes:
            if not left:
                break
            count = min(sequence.remaining, left)
            if (
                sequence.awaits_decode
                and sequence.status is Status.RUNNING
                # If urgency alone decides, sequences that are planned already are never victims.
                and self._places.make_room(sequence, count, plan, planned)
            ):
                self._plan(sequence, count, plan)
                planned.add(sequence.ordinal)
                left -= count
        return budget - left

    def _admit_online(self, plan: StepPlan, room: StepRoom, first: Precedence | None) -> None:
        """Admit waiting sequences, at the cost of batches where necessary."""
        queue = self._places.waiting["online"]
        while room.is_open and (waiting := queue.peek()) is not None:
            if first is not None and first.must_defer(waiting) and not first.room.most_prompt(len(waiting.tokens), 1):
                break  # it would get no tokens in this step: no sequence loses a place for it yet
            # No batch sequence is in the plan yet, so all of them can still go.
            if waiting in plan.preempted or not (
                self._places.fits(waiting) or self._places.clear_of_batches(waiting, plan)
            ):
                break
            self._places.place(waiting)
            if not self._plan_part(waiting, plan, room, first):
                break

    def _plan_part(self, sequence: Sequence, plan: StepPlan, room: StepRoom, first: Precedence | None) -> int:
        """Plan as many tokens of a prompt as there is room for beside newcomers, and return how many."""
        count = room.most_prompt(sequence.num_computed, sequence.remaining)
        count = self._scorable(sequence, count, plan)
        if first is not None and first.must_defer(sequence):
            count = first.room.most_prompt(sequence.num_computed, count)
            if count:
                first.room.take_prompt(sequence.num_computed, count)
        if count:
            room.take_prompt(sequence.num_computed, count)
            self._plan(sequence, count, plan)
        return count

    # Batches

    def _seat_owed(self) -> tuple[int, bool]:
        """Give places to batch sequences that are owed tokens; return these tokens, and whether one still lacks its
        place.

        While one does, no online sequence is admitted, or a stream of them would keep it out forever.
        """
        owed = self._share.due(self.token_budget) if self._places.wants_batch else 0
        if not owed:
            return 0, False
        batches = self._places.batches
        wanted = sum(sequence.remaining for sequence in batches)
        # Once the tokens are paid, the places are still theirs.
        places = self._share.places(self._places.slots) - sum(sequence.kept for sequence in batches)
        while wanted < owed and places > 0 and (waiting := self._places.waiting["batch"].peek()) is not None:
            if not self._places.fits(waiting):
                return min(owed, wanted, self.token_budget), True
            self._places.place(waiting)
            waiting.kept = True
            wanted += waiting.remaining
            places -= 1
        return min(owed, wanted, self.token_budget), False

    def _room(self, now: float, plan: StepPlan, tokens: int, owed: int) -> StepRoom:
        online = self._places.online
        # If an online sequence waits although nothing online is computed, it waits for a place that a batch holds: a
        # short step would make it wait longer.
        waiting = self._places.waiting["online"].peek() if plan.chunks else None
        limit = self.slo.limit(now, online, waiting, self.token_budget)
        return self.slo.room(limit, plan.chunks, tokens, owed)

    def _plan_batch(self, plan: StepPlan, room: StepRoom) -> None:
        if room.is_open:
            self._places.place_urgent("batch", plan)
        self._plan_batch_decodes(plan, room)
        for sequence in self._places.batches:
            if not sequence.is_decode:
                if not (count := room.most_prompt(sequence.num_computed, sequence.remaining)):
                    break
                if count := self._scorable(sequence, count, plan):
                    room.take_prompt(sequence.num_computed, count)
                    self._plan(sequence, count, plan)
        queue = self._places.waiting["batch"]
        # Where it will begin is not known before it has its place, but not after its last token.
        while (waiting := queue.peek()) is not None and room.most_prompt(len(waiting.tokens), 1):
            if waiting in plan.preempted or not self._places.fits(waiting):
                return
            self._places.place(waiting)
            count = room.most_prompt(waiting.num_computed, waiting.remaining)
            if not (count := self._scorable(waiting, count, plan)):
                return
            room.take_prompt(waiting.num_computed, count)
            self._plan(waiting, count, plan)

    def _plan_batch_decodes(self, plan: StepPlan, room: StepRoom) -> None:
        decodes = [sequence for sequence in self._places.batches if sequence.awaits_decode]
        rows = sum(sequence.remaining for sequence in decodes)
        if not room.fits_rows(rows, sum(len(sequence.tokens) for sequence in decodes)):
            decodes.sort(key=_turn)
        planned = set[int]()
        for sequence in decodes:
            if not room.fits_row(len(sequence.tokens)):
                continue
            if sequence.status is not Status.RUNNING:
                continue
            start, count = sequence.num_computed, sequence.remaining
            if count > 1:
                count = max(1, room.most_prompt(start, count))
            if self._places.make_room(sequence, count, plan, planned):
                room.take_prompt(start, count)
                self._plan(sequence, count, plan)
                planned.add(sequence.ordinal)

    def _scorable(self, sequence: Sequence, count: int, plan: StepPlan) -> int:
        """Return how many of the next `count` tokens keep the plan within `max_scored`."""
        if not sequence.scored:
            return count
        first = max(sequence.num_computed, sequence.scored.start)
        most = first + self.max_scored - plan.num_scored
        if most >= sequence.scored.stop:
            return count
        return min(count, max(0, most - sequence.num_computed))

    def _plan(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        start = sequence.num_computed
        end = start + count
        # Nothing follows the last token of a prompt for which only log-probabilities are wanted.
        samples = end == len(sequence.tokens) < sequence.max_total
        chunk = Chunk(
            sequence, start, count, not sequence.started, samples, sequence.is_decode, ends=end == sequence.max_total
        )
        if wanted := sequence.scored:
            chunk.scored = range(max(start, wanted.start), max(start, wanted.start, min(end, wanted.stop)))
        plan.chunks.append(chunk)
        shares = self._places.shares[sequence.traffic]
        if shares.contended:
            shares.serve(sequence, count)
        if count > 1:
            self.blocks.publish(sequence.table, sequence.tokens, end)

    def _publish_decoded(self, sequence: Sequence) -> None:
        if sequence.num_computed % self.blocks.block_size == 0:
            self.blocks.publish(sequence.table, sequence.tokens, sequence.num_computed)


def _turn(sequence: Sequence) -> tuple[tuple[bool, bool, int], int]:
    """Sort key of decodes that do not all fit: by rank, then by how long they have gone without a token."""
    return sequence.rank, sequence.last_turn
