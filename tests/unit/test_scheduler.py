"""The scheduler against an oracle that knows what each KV slot holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.long_form import examples

from batchwright.errors import ContextLengthExceeded, InvalidRequest
from batchwright.kv import BlockManager
from batchwright.request import Traffic
from batchwright.scheduling import Scheduler, Sequence, SloController, Status, repeated

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
        most_forced=st.sampled_from([0, 0, 2, 7]),
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
        most_forced: int,
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
            most_forced=most_forced,
            slo=None if slo == (None, None) else SloController(ttft=slo[0], tpot=slo[1]),
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
    @rule(most=st.integers(1, 6), planned=st.booleans())
    def compute_several(self, most: int, planned: bool) -> None:
        """Compute steps that are known to be alike, some of them without a plan of their own."""
        bench = self.bench
        first = bench.schedule()
        steps = bench.scheduler.reserve_steady_steps(first, most)
        assert 1 <= steps <= most
        bench.check()
        for step in range(1, steps):
            expected = repeated(bench.plan)
            bench.commit()
            assert all(chunk.sequence.status is Status.RUNNING for chunk in first.chunks)
            if planned:
                found = bench.schedule()
                assert found.chunks == expected.chunks, step
                assert not found.preempted
                assert not found.expired
            else:
                bench.take(expected)
        assert steps == 1 or bench.scheduler.next_event() > bench.now
        bench.commit()

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
TestSchedulerMachine.settings = settings(max_examples=examples(60, long=200), stateful_step_count=50)


@settings(max_examples=examples(40, long=100))
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


def test_sequences_of_one_step_share_the_prefix_that_it_computes() -> None:
    bench = Bench(block_size=4)
    shared = [0, 1, 1, 0, 1, 0, 0, 1]
    bench.add([*shared, 0])
    second = bench.add([*shared, 1])
    plan = bench.step()
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(0, 9), (8, 1)]
    assert second.num_cached == 8
    bench.drain()


def test_a_preempted_sequence_counts_its_cached_tokens_once() -> None:
    bench = Bench(num_blocks=16, block_size=2, max_num_seqs=1)
    low = bench.add([0, 1, 0, 1, 1], 6, priority=9)
    bench.step()
    bench.add([1, 1], 2, priority=0)
    bench.drain()
    assert (low.preemptions, low.num_cached) == (1, 0)


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
        kept = scheduler._places.waiting["online"].num_entries + len(scheduler._timetable)
        assert kept <= 3 * 70
