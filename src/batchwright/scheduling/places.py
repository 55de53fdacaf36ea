"""Places: which sequences run, which wait, and which gives up a place or a block for another.

A sequence with a place has blocks for all its known tokens, so only a decode can lack one. Then the least urgent
running sequence is preempted: its blocks are freed and its tokens recomputed later, many of them from the prefix cache.
The most urgent sequence is never preempted, so some sequence always ends. A sequence of which a step computes anything
is no longer preempted once a block of the step is published, so no sequence shares a block that this step drops.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable
from collections.abc import Sequence as Sequences

from batchwright.kv import BlockManager
from batchwright.request import Traffic
from batchwright.scheduling import fairness
from batchwright.scheduling.fairness import FairShares
from batchwright.scheduling.plan import StepPlan
from batchwright.scheduling.sequence import Sequence, Status, Urgency
from batchwright.scheduling.waiting import FairQueue


class Places:
    """At most `max_num_seqs` running sequences, with their blocks, and all waiting ones.

    A waiting sequence that has had no place for `promote_after` goes first; None turns this off.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, promote_after: float | None) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        """Running sequences by urgency, with online ones first."""
        self.waiting: dict[Traffic, FairQueue] = {
            "online": FairQueue(promote_after),
            "batch": FairQueue(promote_after, by_priority=False),
        }
        self.shares: dict[Traffic, FairShares] = {"online": FairShares(), "batch": FairShares()}
        self.keeps_answers = True
        """Whether blocks of answers are kept in the prefix cache as long as others after their sequences have ended."""
        self._num_online = 0
        """Number of running online sequences."""
        self._now = 0.0
        """Time of the current plan."""
        self._token_budget = 0
        """Token budget of the current plan."""

    @property
    def online(self) -> list[Sequence]:
        """Running online sequences, by urgency."""
        return self.running[: self._num_online]

    @property
    def batches(self) -> list[Sequence]:
        """Running sequences of batches, by urgency."""
        return self.running[self._num_online :]

    @property
    def num_waiting(self) -> int:
        return len(self.waiting["online"]) + len(self.waiting["batch"])

    @property
    def wants_batch(self) -> bool:
        """Whether sequences of batches run or wait."""
        return self._num_online < len(self.running) or len(self.waiting["batch"]) > 0

    @property
    def is_full(self) -> bool:
        """Whether a waiting sequence would need another one's place."""
        return len(self.running) >= self.slots

    @property
    def is_mixed(self) -> bool:
        """Whether there are sequences of both classes of traffic."""
        return self.wants_batch and (self._num_online > 0 or len(self.waiting["online"]) > 0)

    @property
    def contended(self) -> bool:
        """Whether several requests share the places of a class of traffic."""
        return any(each.contended for each in self.shares.values())

    def running_of(self, traffic: Traffic) -> int:
        """Return how many sequences of this class run."""
        return self._num_online if traffic == "online" else len(self.running) - self._num_online

    def begin(self, now: float, token_budget: int) -> None:
        """Begin to plan a step of at most `token_budget` tokens at `now`."""
        self._now = now
        self._token_budget = token_budget
        for queue in self.waiting.values():
            queue.begin(now)

    def enter(self, sequence: Sequence) -> None:
        """Add a new sequence to the waiting ones."""
        self.shares[sequence.traffic].enter(sequence)
        self.waiting[sequence.traffic].add(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. Removing it again changes nothing."""
        if sequence.status is Status.RUNNING:
            # Blocks to be written by a step that may still fail must not be shared.
            self.blocks.retract(sequence.table, sequence.num_computed)
            prompt = sequence.num_prompt // self.blocks.block_size
            self._drop(sequence, useful=None if self.keeps_answers else prompt)
        elif sequence.status is Status.WAITING and sequence.queue_entry >= 0:
            self.waiting[sequence.traffic].left(sequence)
        if sequence.status is not Status.FINISHED and sequence.share is not None:
            self.shares[sequence.traffic].leave(sequence)
        sequence.status = Status.FINISHED
        # Ended sequences deep in a queue are removed once they are most of it.
        if sequence.share is not None:
            self.waiting[sequence.traffic].sweep(sequence)

    def promote(self, sequences: Iterable[Sequence]) -> None:
        """Put these sequences before all priorities of their class from now on."""
        promoted = False
        for sequence in sequences:
            sequence.promoted = promoted = True
            if sequence.status is Status.WAITING:
                self.waiting[sequence.traffic].enter(sequence)
        if promoted:
            self.running.sort(key=_urgency)

    # Admission

    def place(self, sequence: Sequence) -> None:
        """Move a sequence to the running ones, with its cached prefix and blocks for its tokens. It must fit."""
        sequence.table, sequence.num_computed = self.blocks.open(sequence.tokens, most=sequence.reusable)
        if not self.blocks.grow(sequence.table, len(sequence.tokens)):
            raise RuntimeError("a sequence was admitted without room for its tokens")
        if not sequence.admitted:
            sequence.admitted = True
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        sequence.status = Status.RUNNING
        self.waiting[sequence.traffic].left(sequence)
        self.shares[sequence.traffic].place(sequence, self._now)
        sequence.started = False
        insort(self.running, sequence, key=_urgency)
        self._num_online += not sequence.is_batch

    def place_alone(self, sequence: Sequence, plan: StepPlan) -> None:
        """Admit a sequence at the cost of any others. Once nothing else runs it fits, or it was never accepted."""
        while self.running and not (
            len(self.running) < self.max_num_seqs and self.blocks.can_open(sequence.tokens, most=sequence.reusable)
        ):
            self.preempt(self.running[-1], plan)
        self.place(sequence)

    def place_urgent(self, traffic: Traffic, plan: StepPlan) -> None:
        """Admit sequences that may take the place of one of their own class."""
        queue, claimed = self.waiting[traffic], 0
        while self.running_of(traffic) and (urgent := queue.peek()) is not None:
            last = self.running[-1] if traffic == "batch" else self.running[self._num_online - 1]
            if urgent.rank >= last.rank or urgent in plan.preempted:
                return
            if claimed and claimed + self.running_of(traffic) >= self._token_budget:
                return
            if not self.fits(urgent) and not self._clear(urgent, plan, self._outranked(urgent)):
                return
            self.place(urgent)
            claimed += urgent.remaining

    def place_fairly(self, plan: StepPlan, budget: int) -> None:
        """Admit online sequences at the cost of shares with more places, and before prompts of shares served more.

        No more of them than this step, of `budget` tokens, can begin.
        """
        queue, claimed = self.waiting["online"], 0
        while claimed < budget and (waiting := queue.peek()) is not None and waiting not in plan.preempted:
            if not self.fits(waiting):
                lower = fairness.placeable(waiting, self.online)
                if not self._clear(waiting, plan, lower + self._removable()):
                    return
            elif not self._goes_first(waiting):
                return
            self.place(waiting)
            claimed += waiting.remaining

    def fits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can have a place now."""
        if self.is_full:
            return False
        # One spare block per running sequence keeps a newcomer from being preempted in its first steps.
        return self.blocks.can_open(sequence.tokens, spare=len(self.running), most=sequence.reusable)

    def clear_of_batches(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt as many sequences of batches as an online one needs. False if all would not be enough."""
        return self._clear(sequence, plan, self._removable())

    def _goes_first(self, waiting: Sequence) -> bool:
        """Return whether its prompt would get its turn before those of all running sequences."""
        turn = fairness.by_turn(waiting)
        return all(fairness.by_turn(each) > turn for each in self.online if not each.is_decode)

    def _removable(self) -> list[Sequence]:
        """Return the batch sequences that give way to online ones."""
        return [sequence for sequence in self.batches if not sequence.kept]

    def _outranked(self, urgent: Sequence) -> list[Sequence]:
        """Return running sequences of a lower rank. Promotion gives no rank over those of another request, nor priority
        over those of another batch.
        """
        rank, share = urgent.rank, urgent.share
        return [
            each
            for each in self.running
            if each.rank > rank
            and not (each.kept and not urgent.is_batch)
            and (
                each.share is share
                or each.traffic != urgent.traffic
                or (each.priority > urgent.priority and not urgent.is_batch)
            )
        ]

    def _clear(self, urgent: Sequence, plan: StepPlan, lower: list[Sequence]) -> bool:
        """Preempt as many of `lower` as necessary. False, without preempting any, if all would not be enough."""
        others = len(self.running) - len(lower)
        if not lower or others >= self.slots:
            return False
        most = urgent.reusable
        if not self.blocks.can_open(urgent.tokens, spare=len(self.running), most=most) and not self.blocks.can_open(
            urgent.tokens, spare=others, without=[each.table for each in lower], most=most
        ):
            return False
        while not self.fits(urgent):
            self.preempt(lower.pop(), plan)
        return True

    @property
    def slots(self) -> int:
        """Most sequences that may run now."""
        # A sequence beyond the budget would hold blocks in vain, and decodes would leave no tokens for prompts.
        return min(self.max_num_seqs, self._token_budget)

    # Blocks

    def make_room(self, sequence: Sequence, count: int, plan: StepPlan, planned: Container[int]) -> bool:
        """Make room for `count` more tokens, at the cost of the least urgent sequence, which may be this one: False
        then.

        `planned`: ordinals of sequences that lose nothing, since this step computes them.
        """
        if sequence.num_computed + count <= len(sequence.table) * self.blocks.block_size:
            return True
        while not self.blocks.grow(sequence.table, sequence.num_computed + count):
            victim = self._victim(sequence, planned)
            self.preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def reserve(self, sequences: Sequences[Sequence], steps: int) -> int:
        """Give decoding sequences blocks for their next `steps` tokens, or for fewer if too few blocks are free.

        Return for how many tokens they then have room; no sequence gives up a block.
        """
        while steps > 1 and sum(self._missing(each, steps) for each in sequences) > self.blocks.num_free:
            steps //= 2
        for sequence in sequences:
            if not self.blocks.grow(sequence.table, sequence.num_computed + steps):
                raise RuntimeError("a decode has no room for its next token")
        return steps

    def _missing(self, sequence: Sequence, steps: int) -> int:
        """Return how many blocks a sequence lacks for its next `steps` tokens."""
        return max(0, self.blocks.blocks_for(sequence.num_computed + steps) - len(sequence.table))

    def make_room_alone(self, sequence: Sequence, count: int, plan: StepPlan) -> None:
        """Make room for `count` more tokens of a running sequence, at the cost of any others."""
        while not self.blocks.grow(sequence.table, sequence.num_computed + count):
            self.preempt(self.running[-1 if self.running[-1] is not sequence else -2], plan)

    def preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Take its place and its blocks from a sequence."""
        plan.preempted.append(victim)
        victim.preemptions += 1
        self.requeue(victim)

    def requeue(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue, with none of its tokens computed."""
        self._drop(sequence)
        sequence.num_computed = 0
        sequence.kept = False
        self.waiting[sequence.traffic].add(sequence)

    def _victim(self, lacking: Sequence, planned: Container[int]) -> Sequence:
        """Return the sequence to give up its blocks: the least urgent one not in this step; lastly, `lacking`."""
        candidates: Iterable[Sequence] = reversed(self.running)
        if self.shares["online"].contended:
            candidates = sorted(self.running, key=fairness.by_burden, reverse=True)
        for sequence in candidates:
            if sequence.ordinal not in planned and (lacking.is_batch or not sequence.kept):
                return sequence
        return lacking

    def _drop(self, sequence: Sequence, *, useful: int | None = None) -> None:
        self.running.remove(sequence)
        self.shares[sequence.traffic].drop(sequence)
        self.waiting[sequence.traffic].place_lost(sequence)
        self._num_online -= not sequence.is_batch
        self.blocks.close(sequence.table, useful=useful)


def _urgency(sequence: Sequence) -> Urgency:
    return sequence.urgency
