"""The scheduler against an oracle that knows what each KV slot holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchwright.errors import ContextLengthExceeded, InvalidRequest
from batchwright.kv import BlockManager
from batchwright.request import Traffic
from batchwright.scheduling import Pace, Scheduler, Sequence, Status

from .oracle import TRAFFICS, Bench

_PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)

Job = tuple[list[int], int, int, float, Traffic]
"""Prompt, most tokens to generate, priority, seconds until its deadline, class."""

_JOB = st.tuples(
    _PROMPTS,
    st.integers(1, 8),
    st.integers(0, 2),
    st.one_of(st.just(math.inf), st.just(math.inf), st.integers(0, 30).map(float)),
    st.sampled_from(TRAFFICS),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.integers(1, 3),
        prefix_caching=st.booleans(),
        max_batch_tokens=st.one_of(st.integers(1, 8), st.integers(4, 64)),
        max_num_seqs=st.integers(1, 8),
        promote_after=st.sampled_from([None, 3.0, 20.0, 20.0]),
        batch_share=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
        slo=st.sampled_from([(None, None), (None, None), (6.0, 1.5), (None, 0.5), (0.3, None)]),
        draft_rows=st.sampled_from([0, 6, 12]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        max_batch_tokens: int,
        max_num_seqs: int,
        promote_after: float | None,
        batch_share: float,
        slo: tuple[float | None, float | None],
        draft_rows: int,
    ) -> None:
        self.bench = Bench(
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_caching=prefix_caching,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            promote_after=promote_after,
            batch_share=batch_share,
            draft_rows=draft_rows,
            pace=None if slo == (None, None) else Pace(ttft=slo[0], tpot=slo[1]),
        )

    @rule(jobs=st.lists(_JOB, min_size=1, max_size=5), known=st.integers(0, 12), pick=st.integers(0, 99))
    def add(self, jobs: list[Job], known: int, pick: int) -> None:
        """Add some, half of the time ones that begin like an earlier one."""
        bench = self.bench
        common = bench.all[pick % len(bench.all)].tokens[:known] if bench.all and pick % 2 else []
        for prompt, output, priority, patience, traffic in jobs:
            prompt = common + prompt
            if bench.blocks.blocks_for(len(prompt) + output) > bench.blocks.num_blocks:
                assert bench.scheduler.refusal(len(prompt), output)
                with pytest.raises(ContextLengthExceeded):
                    bench.add(prompt, output)
                prompt, output = prompt[:2], 1
            bench.add(prompt, output, priority=priority, deadline=bench.now + patience, traffic=traffic)

    @precondition(lambda self: self.bench.in_flight is None and self.bench.scheduler.has_work)
    @rule(steps=st.integers(1, 4))
    def compute(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.step()

    @precondition(lambda self: self.bench.in_flight is None and self.bench.scheduler.has_work)
    @rule()
    def schedule(self) -> None:
        self.bench.schedule()

    @precondition(lambda self: self.bench.in_flight is not None)
    @rule(how=st.sampled_from(["computed", "failed", "out of memory", "failed, find the culprit"]))
    def end_step(self, how: str) -> None:
        bench, plan = self.bench, self.bench.plan
        if how == "computed":
            bench.commit()
            return
        bench.rollback()
        if how == "out of memory":
            tokens, budget = plan.num_tokens, bench.scheduler.token_budget
            assert bench.scheduler.shrink(plan) is (tokens > 1)
            assert bench.scheduler.token_budget == (tokens // 2 if tokens > 1 else budget)
        elif how == "failed, find the culprit" and not bench.isolated:
            bench.isolated = [chunk.sequence for chunk in plan.chunks]
            bench.scheduler.isolate(list(bench.isolated))

    @precondition(lambda self: self.bench.all)
    @rule(pick=st.integers(0, 99))
    def end(self, pick: int) -> None:
        self.bench.scheduler.finish(self.bench.all[pick % len(self.bench.all)])

    @precondition(lambda self: self.bench.in_flight is None and self.bench.scheduler.running)
    @rule(pick=st.integers(0, 99))
    def find_garbage(self, pick: int) -> None:
        running = self.bench.scheduler.running
        self.bench.forget(running[pick % len(running)])

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.bench.now += seconds

    @invariant()
    def always(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            if self.bench.in_flight is not None:
                self.bench.commit()
            self.bench.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, database=None
)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    jobs=st.lists(_JOB, min_size=1, max_size=12),
    block_size=st.integers(1, 4),
    spare_blocks=st.integers(0, 6),
    budget=st.integers(1, 64),
    max_num_seqs=st.integers(1, 12),
    prefix_caching=st.booleans(),
    batch_share=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_every_sequence_comes_to_its_full_length(
    jobs: list[Job],
    block_size: int,
    spare_blocks: int,
    budget: int,
    max_num_seqs: int,
    prefix_caching: bool,
    batch_share: float,
) -> None:
    longest = max(len(prompt) + output for prompt, output, *_ in jobs)
    bench = Bench(
        num_blocks=-(-longest // block_size) + spare_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        max_batch_tokens=budget,
        max_num_seqs=max_num_seqs,
        batch_share=batch_share,
    )
    sequences = [
        bench.add(prompt, output, priority=priority, traffic=traffic) for prompt, output, priority, _, traffic in jobs
    ]
    bench.drain()
    assert all(len(sequence.tokens) == sequence.max_total for sequence in sequences)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    ahead=st.integers(0, 6),
    urgent=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    budget=st.integers(2, 16),
    max_num_seqs=st.integers(1, 4),
    promote_after=st.sampled_from([5.0, 15.0]),
)
def test_a_stream_of_more_urgent_ones_starves_nobody(
    ahead: int, urgent: list[int], budget: int, max_num_seqs: int, promote_after: float
) -> None:
    """More arrive in every step than can be served: promotion, and service in order of arrival, get it through."""
    bench = Bench(num_blocks=8, max_batch_tokens=budget, max_num_seqs=max_num_seqs, promote_after=promote_after)
    for _ in range(ahead):
        bench.add([1, 0, 1], priority=0)
    patient = bench.add([0, 0, 0, 1, 1], priority=9)
    for _ in range(int(promote_after) + 10 * (ahead + 1)):
        for priority in urgent:
            bench.add([1, 1, 0], priority=priority)
        bench.step()
    assert patient.status is Status.FINISHED
    assert len(patient.tokens) == patient.max_total


def test_the_less_urgent_are_preempted_and_the_most_urgent_never() -> None:
    """With so few blocks sequences do push one another out."""
    bench = Bench(num_blocks=5, block_size=2, max_num_seqs=4)
    sequences = [bench.add([token, 1, 0], 6, priority=token) for token in (0, 1, 2)]
    bench.drain()
    assert bench.preemptions > 0
    assert sequences[0].preemptions == 0
    assert bench.preemptions == sum(sequence.preemptions for sequence in sequences)


@pytest.mark.parametrize("limits", [{"max_batch_tokens": 0}, {"max_num_seqs": 0}])
def test_limits_must_be_positive(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Scheduler(BlockManager(1, 1), **{"max_batch_tokens": 1, "max_num_seqs": 1, **limits})


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    assert bench.scheduler.refusal(10, 6) is None
    with pytest.raises(ContextLengthExceeded, match=r"10 prompt tokens and max_tokens=7 need 17 .* holds 16"):
        bench.add([0] * 10, 7)
    assert not bench.scheduler.has_work


def test_a_refused_sequence_can_be_ended_without_harm() -> None:
    bench = Bench(num_blocks=1)
    sequence = Sequence([0] * 9, 9, 12)
    with pytest.raises(ContextLengthExceeded):
        bench.scheduler.add(sequence)
    bench.scheduler.finish(sequence)
    assert (bench.scheduler.num_waiting, bench.scheduler.has_work) == (0, False)


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        Bench().add([])


def test_an_empty_scheduler_plans_nothing() -> None:
    plan = Bench().step()
    assert (plan.chunks, plan.preempted, plan.expired, plan.num_tokens) == ([], [], [], 0)


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add([0, 1, 0], 20)
    bench.step()
    bench.add([1] * 20)
    shapes = [[(chunk.start, chunk.count, chunk.samples) for chunk in bench.step().chunks] for _ in range(3)]
    assert shapes == [
        [(3, 1, True), (0, 7, False)],
        [(4, 1, True), (7, 7, False)],
        [(5, 1, True), (14, 6, True)],
    ]


def test_decodes_beyond_the_budget_go_to_the_most_urgent() -> None:
    bench = Bench(max_batch_tokens=4, max_num_seqs=4)
    low, high, middle = (bench.add([token], 9, priority=priority) for token, priority in ((0, 3), (1, 1), (2, 2)))
    bench.step()
    failed = bench.schedule()
    bench.rollback()
    assert bench.scheduler.shrink(failed)
    assert bench.scheduler.token_budget == 1
    assert [chunk.sequence for chunk in bench.step().chunks] == [high]
    bench.drain()
    assert {len(sequence.tokens) for sequence in (low, middle, high)} == {10}


def test_within_one_priority_the_earlier_deadline_goes_first() -> None:
    bench = Bench(max_num_seqs=1)
    first = bench.add([0], 1)
    late, early = bench.add([1], 1, deadline=90.0), bench.add([2], 1, deadline=50.0)
    order = [bench.step().chunks[0].sequence for _ in range(3)]
    assert order == [early, late, first]


def test_an_urgent_sequence_takes_the_slot_of_the_least_urgent() -> None:
    bench = Bench(max_num_seqs=2)
    lowest, low = bench.add([0, 0], 9, priority=9), bench.add([1, 1], 9, priority=8)
    bench.step()
    urgent = bench.add([0, 1], 2, priority=0)
    plan = bench.step()
    assert plan.preempted == [lowest]
    assert [chunk.sequence for chunk in plan.chunks] == [low, urgent]
    bench.drain()


def test_an_urgent_sequence_gets_tokens_though_decodes_would_take_them_all() -> None:
    bench = Bench(max_batch_tokens=3, max_num_seqs=8)
    for _ in range(3):
        bench.add([0], 20, priority=9)
    bench.step()
    urgent = bench.add([1, 1, 1], 1, priority=0)
    for _ in range(3):
        bench.step()
    assert urgent.status is Status.FINISHED


def test_several_urgent_sequences_are_admitted_in_one_step() -> None:
    bench = Bench(max_num_seqs=4)
    for token in range(4):
        bench.add([token], 20, priority=9)
    bench.step()
    urgent = [bench.add([token, token], 20, priority=1) for token in range(3)]
    plan = bench.step()
    assert len(plan.preempted) == 3
    assert [chunk.sequence for chunk in plan.chunks][1:] == urgent


def test_nobody_is_preempted_for_one_that_would_not_fit_all_the_same() -> None:
    bench = Bench(num_blocks=8, block_size=1, max_num_seqs=4)
    bench.add([0] * 4, 4, priority=0)
    low = bench.add([1], 7, priority=9)
    bench.step()
    bench.add([1] * 4, 2, priority=1)
    assert bench.step().preempted == []
    assert low.status is Status.RUNNING


def test_nobody_is_preempted_when_the_others_alone_fill_a_shrunken_budget() -> None:
    bench = Bench(max_batch_tokens=8, max_num_seqs=8)
    for priority in (0, 0, 0, 9):
        bench.add([0], 20, priority=priority)
    bench.step()
    failed = bench.schedule()
    bench.rollback()
    assert bench.scheduler.shrink(failed)
    bench.add([1], 1, priority=1)
    assert bench.step().preempted == []
    bench.drain()


def test_no_more_are_preempted_than_this_steps_prompts_need() -> None:
    bench = Bench(max_batch_tokens=16, max_num_seqs=4)
    for token in range(4):
        bench.add([token], 20, priority=9)
    bench.step()
    for token in range(4):
        bench.add([token] * 30, 2, priority=1)
    assert len(bench.step().preempted) == 1


def test_one_that_is_preempted_stays_out_of_the_step() -> None:
    """Though it could come back at once, on the blocks of another that generated the same."""
    bench = Bench(num_blocks=8, block_size=1, max_num_seqs=2)
    first = bench.add([0], 7)
    bench.add([1], 1)
    second = bench.add([0], 7)
    while not bench.preemptions:
        plan = bench.step()
    assert plan.preempted == [second]
    assert [chunk.sequence for chunk in plan.chunks] == [first]
    bench.drain()


def test_running_sequences_are_put_in_a_new_order_when_one_is_promoted() -> None:
    bench = Bench(promote_after=3.0)
    low = bench.add([0], 20, priority=9)
    bench.step()
    high = bench.add([1], 20, priority=0)
    bench.step()
    assert bench.scheduler.running == [high, low]
    bench.step()
    bench.step()
    assert bench.scheduler.running == [low, high]


def test_an_equal_priority_preempts_nobody() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add([0], 9)
    bench.step()
    bench.add([1], 9, deadline=100.0)
    assert bench.step().preempted == []


def test_sequences_of_one_step_share_the_prefix_that_it_computes() -> None:
    bench = Bench(block_size=4)
    shared = [0, 1, 1, 0, 1, 0, 0, 1]
    bench.add([*shared, 0])
    second = bench.add([*shared, 1])
    plan = bench.step()
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(0, 9), (8, 1)]
    assert second.num_cached == 8
    bench.drain()


def test_after_a_failed_step_nothing_of_it_is_found_in_the_cache() -> None:
    bench = Bench(block_size=4)
    shared = [0, 1, 1, 0, 1, 0, 0, 1]
    bench.add([*shared, 0])
    bench.add([*shared, 1])
    bench.schedule()
    bench.rollback()
    assert bench.scheduler.running == []
    assert bench.blocks.open([*shared, 5])[1] == 0
    bench.drain()


def test_a_sequence_cancelled_in_a_step_that_fails_leaves_nothing_in_the_cache() -> None:
    bench = Bench(block_size=4)
    prompt = [0, 1, 1, 0, 1, 0, 0, 1, 1]
    cancelled = bench.add(prompt)
    bench.schedule()
    bench.scheduler.finish(cancelled)
    bench.rollback()
    second = bench.add(prompt)
    bench.drain()
    assert second.num_cached == 0


def test_what_is_forgotten_is_computed_again() -> None:
    bench = Bench(block_size=4)
    prompt = [0, 1, 1, 0, 1, 0, 0, 1, 1]
    broken = bench.add(prompt)
    bench.step()
    bench.forget(broken)
    second = bench.add(prompt)
    bench.drain()
    assert second.num_cached == 0


def test_a_preempted_sequence_counts_its_cached_tokens_once() -> None:
    bench = Bench(num_blocks=16, block_size=2, max_num_seqs=1)
    low = bench.add([0, 1, 0, 1, 1], 6, priority=9)
    bench.step()
    bench.add([1, 1], 2, priority=0)
    bench.drain()
    assert (low.preemptions, low.num_cached) == (1, 0)


def test_a_budget_grows_back_after_it_was_shrunk() -> None:
    bench = Bench(max_batch_tokens=16, num_blocks=200)
    bench.add([0] * 16, 400)
    plan = bench.schedule()
    bench.rollback()
    assert bench.scheduler.shrink(plan)
    assert bench.scheduler.token_budget == 8
    bench.step()
    for _ in range(63):
        assert bench.scheduler.token_budget == 8
        bench.step()
    assert bench.scheduler.token_budget == 16
    for _ in range(100):
        bench.step()
    assert bench.scheduler.token_budget == 16


def test_a_step_of_one_token_cannot_shrink() -> None:
    bench = Bench()
    bench.add([0])
    plan = bench.schedule()
    bench.rollback()
    assert not bench.scheduler.shrink(plan)


def test_isolated_sequences_run_alone_one_after_another_and_then_together_again() -> None:
    bench = Bench()
    sequences = [bench.add([token, 0, 1], 9) for token in range(3)]
    bench.schedule()
    bench.rollback()
    bench.isolated = list(sequences)
    bench.scheduler.isolate(sequences)
    seen = [[chunk.sequence for chunk in bench.step().chunks] for _ in range(4)]
    assert seen == [*([sequence] for sequence in sequences), sequences]


def test_an_isolated_sequence_finds_room_when_others_hold_it_all() -> None:
    bench = Bench(num_blocks=4, block_size=2, max_num_seqs=2)
    bench.add([0] * 3, 4, priority=0)
    bench.step()
    waiting = bench.add([1] * 5, 2, priority=9)
    bench.isolated = [waiting]
    bench.scheduler.isolate([waiting])
    assert [chunk.sequence for chunk in bench.step().chunks] == [waiting]
    bench.drain()


def test_an_isolated_sequence_takes_the_block_that_it_lacks_from_another() -> None:
    bench = Bench(num_blocks=4, block_size=1, max_num_seqs=2)
    other, lacking = bench.add([0], 3, priority=0), bench.add([1], 3, priority=9)
    bench.step()
    bench.step()
    assert bench.blocks.num_free == 0
    bench.isolated = [lacking]
    bench.scheduler.isolate([lacking])
    plan = bench.step()
    assert [chunk.sequence for chunk in plan.chunks] == [lacking]
    assert plan.preempted == [other]
    bench.drain()


def test_a_deadline_ends_running_and_waiting_sequences_and_frees_their_blocks() -> None:
    bench = Bench(max_num_seqs=1)
    running = bench.add([0, 1], 50, deadline=3.0)
    waiting = bench.add([1, 1], 50, deadline=3.0)
    for _ in range(3):
        assert bench.step().expired == []
    plan = bench.step()
    assert plan.expired == [running, waiting]
    assert plan.chunks == []
    assert not bench.scheduler.has_work
    assert bench.blocks.num_used == 0


def test_an_ended_sequence_can_be_ended_again() -> None:
    bench = Bench()
    running = bench.add([0])
    bench.step()
    waiting = bench.add([1])
    for _ in range(2):
        bench.scheduler.finish(running)
        bench.scheduler.finish(waiting)
    bench.check()
    assert not bench.scheduler.has_work


def test_promoted_sequences_are_served_in_order_of_arrival_whatever_their_priority() -> None:
    bench = Bench(max_num_seqs=1, promote_after=5.0)
    low, high = bench.add([0], 1, priority=9), bench.add([1], 1, priority=0)
    bench.now = 5.0
    newest = bench.add([2], 1, priority=-3)
    bench.step()
    order = [low, high, newest]
    assert low.status is Status.FINISHED
    bench.step()
    assert high.status is Status.FINISHED
    bench.drain()
    assert [sequence.promoted for sequence in order] == [True, True, False]


def test_ended_sequences_are_let_go_of() -> None:
    """Cancelled ones deep in the queue, and deadlines far off, do not fill the memory."""
    for promote_after in (None, 1e9):
        bench = Bench(max_num_seqs=1, promote_after=promote_after)
        scheduler = bench.scheduler
        scheduler.add(Sequence([0], 1, 200))
        for number in range(1000):
            sequence = Sequence([0], 1, 2, deadline=1e9 + number)
            scheduler.add(sequence)
            scheduler.finish(sequence)
        kept = scheduler._waiting["online"].num_entries + len(scheduler._deadlines) + len(scheduler._arrivals)
        assert kept <= 3 * 70
