"""Who goes first in the scheduler: priorities, deadlines, promotion, and who gives up a place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.scheduling import Status

from .oracle import Bench


@settings(max_examples=examples(15, long=40))
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
