"""A scheduler with an oracle beside it that knows what each KV slot holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from batchwright.kv import BlockManager
from batchwright.request import Flow, Traffic
from batchwright.scheduling import Chunk, Drafter, EndedAnswers, Scheduler, Sequence, SloController, Status, StepPlan

_GARBAGE = -1
TRAFFICS: tuple[Traffic, ...] = ("online", "batch")


def _histories(tokens: Items[int], start: int = 0) -> Iterator[int]:
    """For each token, a number that stands for all tokens up to it; `start` stands for those before."""
    history = start
    for token in tokens:
        history = hash((history, token))
        yield history


@dataclass(slots=True)
class Write:
    """What a step writes for one chunk: kept apart from the scheduler's state, as on a device."""

    chunk: Chunk
    blocks: list[int]
    tokens: list[int]

    @property
    def end(self) -> int:
        return self.chunk.start + self.chunk.count + len(self.chunk.drafts)


class Bench:
    """A scheduler, and the contents of every slot of its blocks: the history of tokens that was computed there.

    Every plan is checked, and after every step each computed position is read back.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_caching: bool = True,
        max_batch_tokens: int = 64,
        max_num_seqs: int = 8,
        promote_after: float | None = None,
        batch_share: float = 0.0,
        draft_rows: int = 0,
        slo: SloController | None = None,
        shared: bool = False,
        most_forced: int = 0,
    ) -> None:
        """`shared`: several flows share it, so urgency alone does not say who goes first; tests of fairness do.
        `most_forced`: most tokens that follow a chosen one at once.
        """
        self.shared = shared
        self.most_forced = most_forced
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            promote_after=promote_after,
            batch_share=batch_share,
            draft_rows=draft_rows,
            slo=slo,
        )
        self.share = batch_share
        self.paced = slo is not None
        self.size = block_size
        self.now = 0.0
        self.all: list[Sequence] = []
        self.preemptions = self.accepted = 0
        self.ended_answers = EndedAnswers()
        self.scored: dict[int, list[int]] = {}
        """Positions whose logits were given, by the ordinal of the sequence."""
        self.ended = set[int]()
        """Ordinals of sequences of which no token was wanted, and that are computed."""
        self.isolated: list[Sequence] = []
        self.in_flight: list[Write] | None = None
        self.plan = StepPlan()
        self._cells: dict[tuple[int, int], int] = {}

    def add(
        self,
        prompt: Items[int],
        output: int = 3,
        *,
        priority: int = 5,
        deadline: float = math.inf,
        traffic: Traffic = "online",
        flow: Flow | None = None,
        scored: range = range(0),
    ) -> Sequence:
        sequence = Sequence(list(prompt), len(prompt), len(prompt) + output, priority, deadline, self.now, traffic)
        sequence.flow, sequence.scored = flow, scored
        sequence.drafter = Drafter(self.ended_answers) if self.scheduler.draft_rows else None
        self.scheduler.add(sequence)
        self.all.append(sequence)
        return sequence

    @property
    def alive(self) -> list[Sequence]:
        return [sequence for sequence in self.all if sequence.status is not Status.FINISHED]

    def schedule(self) -> StepPlan:
        alive, before = self.alive, list(self.scheduler.running)
        computed = {id(sequence): sequence.num_computed for sequence in alive}
        self._due = self.scheduler._share.due(self.scheduler.token_budget)
        alone = next((each for each in self.isolated if each in alive and each.deadline > self.now), None)
        plan = self.scheduler.schedule(self.now)
        self.take(plan)
        self.preemptions += len(plan.preempted)
        assert {id(s) for s in plan.expired} == {id(s) for s in alive if s.deadline <= self.now}
        assert all(sequence.status is Status.FINISHED for sequence in plan.expired)
        self._check_chunks(before, computed)
        if alone is not None:
            assert [chunk.sequence for chunk in plan.chunks] == [alone]
            self.isolated = self.isolated[self.isolated.index(alone) + 1 :]
        else:
            self.isolated = []
            if not self.shared:
                self._check_victims(before)
                self._check_online_first()
                self._check_order_within_kinds()
                self._check_admission(before)
                self._check_nothing_idles()
        self.check()
        return plan

    def take(self, plan: StepPlan) -> None:
        """Have `plan` computed next."""
        self.plan = plan
        self.in_flight = [
            Write(chunk, list(chunk.sequence.table.blocks), chunk.sequence.tokens + chunk.drafts)
            for chunk in plan.chunks
        ]

    def commit(self) -> None:
        """Write all chunks, then read all that each chunk attends to, then let the scheduler know."""
        assert self.in_flight is not None
        for write in self.in_flight:
            for position, history in enumerate(_histories(write.tokens[: write.end])):
                if position >= write.chunk.start:
                    self._cells[self._slot(write.blocks, position)] = history
        for write in self.in_flight:
            self._read(write.blocks, write.tokens, write.end)
        self.in_flight = None
        self.scheduler.commit(self.plan)
        for chunk in self.plan.chunks:
            if chunk.sequence.status is Status.RUNNING:
                self.scored.setdefault(chunk.sequence.ordinal, []).extend(chunk.scored)
                if chunk.ends:
                    self.ended.add(chunk.sequence.ordinal)
                    self.scheduler.finish(chunk.sequence)
        self.scheduler.measured(self.plan, self.seconds(self.plan))
        self.check()
        for chunk in self.plan.chunks:
            if chunk.samples:
                self._deliver(chunk)
                self._force(chunk.sequence)

    def _force(self, sequence: Sequence) -> None:
        """Append tokens that are certain to follow."""
        sequence.forced = 0
        number = hash(tuple(sequence.tokens)) % (self.most_forced + 1)
        while sequence.status is Status.RUNNING and sequence.forced < number:
            sequence.tokens.append(hash(tuple(sequence.tokens)) % 2)
            sequence.forced += 1
            if len(sequence.tokens) >= sequence.max_total:
                self.scheduler.finish(sequence)

    def _deliver(self, chunk: Chunk) -> None:
        """What follows the chunk, and what follows each draft as long as they are right."""
        sequence = chunk.sequence
        for draft in (*chunk.drafts, None):
            if sequence.status is not Status.RUNNING:
                return
            token = hash((tuple(sequence.tokens), sequence.ordinal % 2)) % 2
            sequence.tokens.append(token)
            if len(sequence.tokens) >= sequence.max_total:
                self.scheduler.finish(sequence)
            if token != draft:
                return
            self.scheduler.accept_draft(sequence)
            self.accepted += 1

    def seconds(self, plan: StepPlan) -> float:
        """What a step takes as the scheduler is told; the clock of the bench goes on by 1 whatever it is."""
        return 0.25 + 0.125 * plan.num_tokens

    def rollback(self) -> None:
        """The step broke off: whatever it was to write is garbage."""
        assert self.in_flight is not None
        for write in self.in_flight:
            for position in range(write.chunk.start, write.end):
                self._cells[self._slot(write.blocks, position)] = _GARBAGE
        self.in_flight = None
        self.scheduler.rollback(self.plan)
        self.check()

    def forget(self, sequence: Sequence) -> None:
        """Its contents are garbage, except in blocks that others hold too."""
        for block in sequence.table.blocks:
            if self.blocks._references[block] == 1:
                self._cells.update({(block, offset): _GARBAGE for offset in range(self.size)})
        self.scheduler.forget(sequence)
        self.scheduler.finish(sequence)

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.commit()
        self.now += 1.0
        return plan

    def drain(self) -> int:
        """Step until nothing is left, within a bound: each step computes at least one token of the most urgent."""
        alive = self.alive
        bound = 10 + sum(sequence.max_total + 1 for sequence in alive) * (len(alive) + 1) + len(self.isolated)
        if self.share:  # some steps go to the most urgent one of a batch
            bound = int(bound * (1 + 1 / (1 - self.share)))
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps <= bound
        assert not self.alive
        assert self.blocks.num_used == 0
        return steps

    def check(self) -> None:
        """What is true at any moment."""
        scheduler, running = self.scheduler, self.scheduler.running
        self.blocks.check([sequence.table for sequence in running])
        assert all(sequence.status is Status.RUNNING for sequence in running)
        assert sum(sequence.status is Status.RUNNING for sequence in self.all) == len(running)
        assert scheduler.num_waiting == sum(sequence.status is Status.WAITING for sequence in self.all)
        for traffic in TRAFFICS:
            assert scheduler.running_of(traffic) == len(self._running(traffic))
            waiting = [s for s in self.all if s.status is Status.WAITING and s.traffic == traffic]
            assert scheduler.waiting_of(traffic) == len(waiting)
        assert scheduler.has_work == bool(self.alive)
        assert len(running) <= scheduler.max_num_seqs
        assert sum(sequence.kept for sequence in running) <= max(1, int(self.share * scheduler.max_num_seqs))
        assert 1 <= scheduler.token_budget <= scheduler.max_batch_tokens
        assert running == sorted(running, key=lambda sequence: sequence.urgency)
        if self.in_flight is None:
            for sequence in running:
                self._read(list(sequence.table.blocks), sequence.tokens, sequence.num_computed)
            self._check_cache()

    def _check_cache(self) -> None:
        """Every block that a later sequence could find holds what it is found by."""
        ends = {0: 0}
        entries = sorted(self.blocks._published.items(), key=lambda entry: entry[1][1])
        for (parent, tokens), (block, prefix) in entries:
            if parent in ends:
                histories = list(_histories(tokens, ends[parent]))
                ends[prefix] = histories[-1]
                assert [self._cells[block, offset] for offset in range(self.size)] == histories

    def _check_chunks(self, before: list[Sequence], computed: dict[int, int]) -> None:
        plan, outside = self.plan, {id(sequence) for sequence in (*self.plan.preempted, *self.plan.expired)}
        assert plan.num_tokens <= self.scheduler.token_budget
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert sequence.status is Status.RUNNING
            assert id(sequence) not in outside
            assert chunk.count >= 1
            assert chunk.start == sequence.num_computed
            assert chunk.start + chunk.count <= min(len(sequence.tokens), len(sequence.table) * self.size)
            assert chunk.start + chunk.count + len(chunk.drafts) <= len(sequence.table) * self.size
            if chunk.drafts:
                assert plan.num_rows <= self.scheduler.draft_rows
                assert len(sequence.tokens) + len(chunk.drafts) < sequence.max_total
            end = chunk.start + chunk.count
            assert chunk.samples == (end == len(sequence.tokens) < sequence.max_total)
            assert chunk.ends == (end == sequence.max_total)
            wanted = sequence.scored
            assert list(chunk.scored) == [each for each in range(chunk.start, end) if each in wanted]
            # No position whose logits are still wanted was found in the cache, or passed over.
            assert not wanted or chunk.start <= wanted.start
            assert chunk.fresh or sequence in before
            if sequence in before:
                assert sequence.num_computed == computed[id(sequence)]
        assert plan.chunks or not self.scheduler.has_work

    def _check_victims(self, before: list[Sequence]) -> None:
        """The least urgent go, except those that batches are owed, and decodes of batches that this step computes."""
        planned = {id(chunk.sequence) for chunk in self.plan.chunks}
        for victim in self.plan.preempted:
            assert victim.status is Status.WAITING
            for sequence in self.scheduler.running:
                if sequence in before and not sequence.kept and not (victim.is_batch and id(sequence) in planned):
                    assert victim.urgency > sequence.urgency

    def _check_online_first(self) -> None:
        """A batch gets what online sequences cannot use, or what it is owed."""
        if not self.plan.num_batch_tokens:
            return
        ends = {id(chunk.sequence) for chunk in self.plan.chunks if chunk.samples}
        if not all(id(sequence) in ends for sequence in self._running("online")):
            assert self.plan.num_batch_tokens <= self._due

    def _check_order_within_kinds(self) -> None:
        planned = {id(chunk.sequence) for chunk in self.plan.chunks}
        for traffic in TRAFFICS:
            if traffic == "batch" and self.paced:
                continue
            for decodes in (True, False):
                kind = [s for s in self._running(traffic) if s.is_decode is decodes]
                if traffic == "batch" and decodes:
                    kind.sort(key=lambda s: (s.rank, s.last_turn))
                served = [id(sequence) in planned for sequence in kind]
                assert served == sorted(served, reverse=True)
            cut = [c for c in self.plan.chunks if not c.samples and c.sequence.traffic == traffic]
            assert len(cut) <= 1
            assert not cut or self.share or self.plan.num_tokens == self.scheduler.token_budget

    def _check_admission(self, before: list[Sequence]) -> None:
        """By urgency; and nobody of a lower rank goes on while one of a higher rank could have its place."""
        for traffic in TRAFFICS:
            waiting = self._first_waiting(traffic)
            if waiting is None or not self.scheduler.running:
                continue
            admitted = [sequence for sequence in self._running(traffic) if sequence not in before]
            # One that is owed its place may have it before another loses its own to an online sequence.
            if not (self.share and waiting in self.plan.preempted):
                assert all(sequence.urgency < waiting.urgency for sequence in admitted)
            has_tokens = traffic == "online" or not self.paced
            left = self.scheduler.token_budget - (self.plan.num_tokens - self.plan.num_batch_tokens)
            if admitted or not has_tokens or not left or self.share:
                continue
            lower = [sequence for sequence in self.scheduler.running if sequence.rank > waiting.rank]
            if lower:
                assert not self._could_have_places(waiting, lower)

    def _could_have_places(self, waiting: Sequence, lower: list[Sequence]) -> bool:
        blocks, tables = copy.deepcopy((self.blocks, [sequence.table for sequence in lower]))
        for table in tables:
            blocks.close(table)
        others = len(self.scheduler.running) - len(lower)
        slots = min(self.scheduler.max_num_seqs, self.scheduler.token_budget)
        return others < slots and blocks.blocks_for(len(waiting.tokens)) + others <= blocks.num_free

    def _check_nothing_idles(self) -> None:
        """Budget is left over only when no running sequence and no waiting one could use it."""
        scheduler = self.scheduler
        if self.plan.num_tokens == scheduler.token_budget or self.paced or self.share:
            return
        assert len(self.plan.chunks) == len(scheduler.running)
        for waiting in (self._first_waiting("online"), self._first_waiting("batch")):
            if waiting is not None and waiting not in self.plan.preempted:
                assert len(scheduler.running) >= min(
                    scheduler.max_num_seqs, scheduler.token_budget
                ) or not self.blocks.can_open(waiting.tokens, spare=len(scheduler.running))

    def _running(self, traffic: Traffic) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.running if sequence.traffic == traffic]

    def _first_waiting(self, traffic: Traffic) -> Sequence | None:
        waiting = [s for s in self.alive if s.status is Status.WAITING and s.traffic == traffic]
        return min(waiting, key=lambda sequence: sequence.urgency, default=None)

    def _slot(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.size], position % self.size

    def _read(self, blocks: list[int], tokens: list[int], end: int) -> None:
        for position, history in enumerate(_histories(tokens[:end])):
            assert self._cells.get(self._slot(blocks, position)) == history
