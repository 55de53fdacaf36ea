"""Steps that are committed while they are computed, so that the next one is planned before their tokens are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from batchwright.kv import BlockManager
from batchwright.request import Traffic
from batchwright.scheduling import Scheduler, Sequence, Status, StepPlan


@dataclass
class Ahead:
    """A scheduler that always has one step open, and the steps' tokens one step late."""

    scheduler: Scheduler
    ends_after: dict[int, int]
    """Tokens after which a sequence ends though it may have more, by its ordinal."""
    plan: StepPlan = field(default_factory=StepPlan)
    positions: dict[int, list[int]] = field(default_factory=dict)
    """Positions of answers that were computed, by ordinal, since the sequence was last admitted."""

    def step(self) -> None:
        """Plan the next step, then learn the tokens of this one."""
        plan, sampled = self.plan, [chunk.sequence for chunk in self.plan.chunks if chunk.samples]
        self.scheduler.commit(plan)
        running = [each for each in sampled if each.status is Status.RUNNING]
        more = [each for each in running if len(each.tokens) + 1 < each.max_total]
        for sequence in more:
            sequence.tokens.append(0)
        self.plan = self.scheduler.schedule(0.0)
        self._check()
        for sequence in running:
            if sequence not in more:
                sequence.tokens.append(0)
            generated = sequence.num_generated
            if len(sequence.tokens) == sequence.max_total or generated >= self.ends_after[sequence.ordinal]:
                self.scheduler.finish(sequence)

    def _check(self) -> None:
        planned = [chunk.sequence.ordinal for chunk in self.plan.chunks]
        assert len(planned) == len(set(planned))
        for chunk in self.plan.chunks:
            assert chunk.count > 0
            assert chunk.start == chunk.sequence.num_computed
            assert chunk.samples == (chunk.start + chunk.count == len(chunk.sequence.tokens))
            assert not chunk.ends
        assert self.plan.num_tokens <= self.scheduler.token_budget


_Request = tuple[int, int, int, Traffic]


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 12), st.sampled_from(["online", "batch"]))
    ),
    st.integers(10, 40),
    st.integers(1, 16),
    st.integers(1, 6),
)
def test_every_answer_is_computed_to_its_end(
    requests: list[_Request], num_blocks: int, budget: int, num_seqs: int
) -> None:
    blocks = BlockManager(num_blocks + 11, 4)
    bench = Ahead(Scheduler(blocks, max_batch_tokens=budget, max_num_seqs=num_seqs), {})
    sequences = []
    for number, (prompt, output, end, traffic) in enumerate(requests):
        sequences.append(Sequence([number] * prompt, prompt, prompt + output, traffic=traffic))
        bench.scheduler.add(sequences[-1])
        bench.ends_after[sequences[-1].ordinal] = end
    for _ in range(5000):
        if not (bench.scheduler.has_work or bench.plan.chunks):
            break
        bench.step()
    assert [each.num_generated for each in sequences] == [min(output, end) for _, output, end, _ in requests]
    assert all(each.status is Status.FINISHED for each in sequences)
    assert blocks.num_used == 0


def test_the_last_token_of_a_sequence_leaves_nothing_to_plan() -> None:
    scheduler = Scheduler(BlockManager(16, 4), max_batch_tokens=16, max_num_seqs=4)
    ending, going_on = Sequence([1], 1, 2), Sequence([2], 1, 9)
    for sequence in (ending, going_on):
        scheduler.add(sequence)
    scheduler.commit(scheduler.schedule(0.0))
    going_on.tokens.append(0)
    assert [(chunk.sequence, chunk.count) for chunk in scheduler.schedule(0.0).chunks] == [(going_on, 1)]
