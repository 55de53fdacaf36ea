"""A scheduler with an oracle beside it that knows what each KV slot holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from batchwright.kv import BlockManager
from batchwright.scheduling import Chunk, Scheduler, Sequence, Status, StepPlan

_GARBAGE = -1


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
        return self.chunk.start + self.chunk.count


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
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.blocks, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, promote_after=promote_after
        )
        self.size = block_size
        self.now = 0.0
        self.all: list[Sequence] = []
        self.preemptions = 0
        self.isolated: list[Sequence] = []
        self.in_flight: list[Write] | None = None
        self.plan = StepPlan()
        self._cells: dict[tuple[int, int], int] = {}

    def add(self, prompt: Items[int], output: int = 3, *, priority: int = 5, deadline: float = math.inf) -> Sequence:
        sequence = Sequence(list(prompt), len(prompt), len(prompt) + output, priority, deadline, self.now)
        self.scheduler.add(sequence)
        self.all.append(sequence)
        return sequence

    @property
    def alive(self) -> list[Sequence]:
        return [sequence for sequence in self.all if sequence.status is not Status.FINISHED]

    def schedule(self) -> StepPlan:
        alive, before = self.alive, list(self.scheduler.running)
        computed = {id(sequence): sequence.num_computed for sequence in alive}
        alone = next((each for each in self.isolated if each in alive and each.deadline > self.now), None)
        self.plan = plan = self.scheduler.schedule(self.now)
        self.in_flight = [
            Write(chunk, list(chunk.sequence.table.blocks), list(chunk.sequence.tokens)) for chunk in plan.chunks
        ]
        self.preemptions += len(plan.preempted)
        assert {id(s) for s in plan.expired} == {id(s) for s in alive if s.deadline <= self.now}
        assert all(sequence.status is Status.FINISHED for sequence in plan.expired)
        self._check_chunks(before, computed)
        if alone is not None:
            assert [chunk.sequence for chunk in plan.chunks] == [alone]
            self.isolated = self.isolated[self.isolated.index(alone) + 1 :]
        else:
            self.isolated = []
            self._check_victims(before)
            self._check_order_within_kinds()
            self._check_admission(before)
            self._check_nothing_idles()
        self.check()
        return plan

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
        self.check()
        for chunk in self.plan.chunks:
            sequence = chunk.sequence
            if chunk.samples and sequence.status is Status.RUNNING:
                sequence.tokens.append(hash((tuple(sequence.tokens), sequence.ordinal % 2)) % 2)
                if len(sequence.tokens) >= sequence.max_total:
                    self.scheduler.finish(sequence)

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
        assert scheduler.has_work == bool(self.alive)
        assert len(running) <= scheduler.max_num_seqs
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
            assert chunk.samples == (chunk.start + chunk.count == len(sequence.tokens))
            assert chunk.fresh or sequence in before
            if sequence in before:
                assert sequence.num_computed == computed[id(sequence)]
        assert plan.chunks or not self.scheduler.has_work

    def _check_victims(self, before: list[Sequence]) -> None:
        kept = [sequence.urgency for sequence in self.scheduler.running if sequence in before]
        assert all(victim.urgency > urgency for victim in self.plan.preempted for urgency in kept)
        assert all(victim.status is Status.WAITING for victim in self.plan.preempted)

    def _check_order_within_kinds(self) -> None:
        planned = {id(chunk.sequence) for chunk in self.plan.chunks}
        for decodes in (True, False):
            kind = [s for s in self.scheduler.running if (s.remaining == 1) is decodes]
            served = [id(sequence) in planned for sequence in kind]
            assert served == sorted(served, reverse=True)
        cut = [chunk for chunk in self.plan.chunks if not chunk.samples]
        assert len(cut) <= 1
        assert not cut or self.plan.num_tokens == self.scheduler.token_budget

    def _check_admission(self, before: list[Sequence]) -> None:
        """By urgency; and nobody of a lower class goes on while one of a higher class could have its place."""
        running = self.scheduler.running
        waiting = sorted((s for s in self.alive if s.status is Status.WAITING), key=lambda s: s.urgency)
        if not waiting or not running:
            return
        admitted = [sequence for sequence in running if sequence not in before]
        assert all(sequence.urgency < waiting[0].urgency for sequence in admitted)
        rank = waiting[0].urgency[:3]
        lower = [sequence for sequence in running if sequence.urgency[:3] > rank]
        if lower and not admitted:
            blocks, tables = copy.deepcopy((self.blocks, [sequence.table for sequence in lower]))
            for table in tables:
                blocks.close(table)
            others = len(running) - len(lower)
            slots = min(self.scheduler.max_num_seqs, self.scheduler.token_budget)
            assert others >= slots or blocks.blocks_for(len(waiting[0].tokens)) + others > blocks.num_free

    def _check_nothing_idles(self) -> None:
        """Budget is left over only when no running sequence and no waiting one could use it."""
        scheduler = self.scheduler
        if self.plan.num_tokens == scheduler.token_budget:
            return
        assert len(self.plan.chunks) == len(scheduler.running)
        waiting = min((s for s in self.alive if s.status is Status.WAITING), key=lambda s: s.urgency, default=None)
        if waiting is not None and waiting not in self.plan.preempted:
            assert len(scheduler.running) >= min(
                scheduler.max_num_seqs, scheduler.token_budget
            ) or not self.blocks.can_open(waiting.tokens, spare=len(scheduler.running))

    def _slot(self, blocks: list[int], position: int) -> tuple[int, int]:
        return blocks[position // self.size], position % self.size

    def _read(self, blocks: list[int], tokens: list[int], end: int) -> None:
        for position, history in enumerate(_histories(tokens[:end])):
            assert self._cells.get(self._slot(blocks, position)) == history
