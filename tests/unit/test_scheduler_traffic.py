"""Online sequences before those of batches: places, tokens, the floor under batches, and who goes without."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.kv import BlockManager
from batchwright.scheduling import Scheduler, Sequence, SloController, Status
from batchwright.scheduling.slo import BatchShare

from .oracle import Bench

_QUICK = settings(max_examples=examples(25, long=50))


@_QUICK
@given(
    batch=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 9)), min_size=1, max_size=12),
    steps=st.integers(0, 12),
    online=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    num_blocks=st.integers(10, 24),
    prefix_caching=st.booleans(),
    slo=st.booleans(),
)
def test_online_sequences_have_their_places_and_tokens_in_the_next_step_whatever_batches_hold(
    batch: list[tuple[int, int, int]],
    steps: int,
    online: list[int],
    num_blocks: int,
    prefix_caching: bool,
    slo: bool,
) -> None:
    """As many as would fit alone are in the plan at once, though slots, blocks and tokens are all taken."""
    bench = Bench(
        num_blocks=num_blocks,
        block_size=2,
        prefix_caching=prefix_caching,
        max_batch_tokens=18,
        max_num_seqs=3,
        slo=SloController(ttft=9.0, tpot=2.0) if slo else None,
        promote_after=4.0,
    )
    for number, (prompt, output, priority) in enumerate(batch):
        bench.add([number % 3] * prompt, output, priority=priority, traffic="batch")
    for _ in range(steps):
        bench.step()
    urgent = [bench.add([7] * length, 1, priority=9) for length in online]
    # 3 sequences of at most 6 tokens: 18 tokens, 9 blocks, and one to spare for each of the two before the last.
    planned = [chunk.sequence for chunk in bench.step().chunks]
    assert [sequence for sequence in planned if not sequence.is_batch] == urgent
    assert {sequence.status for sequence in urgent} == {Status.FINISHED}
    bench.drain()


def test_a_batch_gives_its_slot_up_though_its_priority_and_its_age_are_higher() -> None:
    bench = Bench(max_num_seqs=1, promote_after=2.0)
    batch = bench.add([0], 9, priority=0, traffic="batch")
    for _ in range(3):
        bench.step()
    assert batch.promoted
    online = bench.add([1], 2, priority=9)
    plan = bench.step()
    assert plan.preempted == [batch]
    assert [chunk.sequence for chunk in plan.chunks] == [online]
    bench.drain()
    assert batch.status is Status.FINISHED


def test_batches_get_the_tokens_that_online_prompts_leave() -> None:
    bench = Bench(max_batch_tokens=10)
    batch = [bench.add([token], 20, traffic="batch") for token in range(4)]
    bench.step()
    bench.add([5] * 15, 1)
    shapes = [[(chunk.sequence.is_batch, chunk.count) for chunk in bench.step().chunks] for _ in range(2)]
    assert shapes == [[(False, 10)], [(False, 5), *[(True, 1)] * 4]]
    assert all(sequence.preemptions == 0 for sequence in batch)


def test_within_batches_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    bench = Bench(max_num_seqs=2)
    low = bench.add([0], 9, priority=9, traffic="batch")
    online = bench.add([2], 9)
    bench.step()
    high = bench.add([1], 9, priority=1, traffic="batch")
    plan = bench.step()
    assert plan.preempted == [low]
    assert [chunk.sequence for chunk in plan.chunks] == [online, high]


@_QUICK
@given(
    share=st.sampled_from([0.02, 0.1, 0.3, 0.6]),
    jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5),
    budget=st.integers(1, 16),
    max_num_seqs=st.integers(1, 6),
    num_blocks=st.integers(5, 20),
    slo=st.booleans(),
)
def test_a_batch_with_a_share_ends_though_online_traffic_never_lets_up(
    share: float, jobs: list[tuple[int, int]], budget: int, max_num_seqs: int, num_blocks: int, slo: bool
) -> None:
    bench = Bench(
        num_blocks=num_blocks,
        max_batch_tokens=budget,
        max_num_seqs=max_num_seqs,
        batch_share=share,
        slo=SloController(ttft=0.2, tpot=0.2) if slo else None,  # out of reach
    )
    batch = [bench.add([1] * prompt, output, traffic="batch") for prompt, output in jobs]
    steps = 0
    while any(sequence.status is not Status.FINISHED for sequence in batch):
        while bench.scheduler.waiting_of("online") < 3:
            bench.add([0, 1, 0], 4)
        bench.step()
        steps += 1
        assert steps < 4000
    assert all(len(sequence.tokens) == sequence.max_total for sequence in batch)


@settings(max_examples=examples(6, long=12))
@given(share=st.sampled_from([0.02, 0.1, 0.3, 0.6]), budget=st.integers(4, 24))
def test_of_an_overloaded_engine_batches_get_their_share_and_at_most_a_place_more(share: float, budget: int) -> None:
    bench = Bench(num_blocks=400, max_batch_tokens=budget, max_num_seqs=64, batch_share=share)
    computed = {"online": 0, "batch": 0}
    for _ in range(150):
        while bench.scheduler.waiting_of("online") < budget:
            bench.add([0, 1, 1, 0, 0], 3)
        while bench.scheduler.waiting_of("batch") < budget:
            bench.add([1, 0, 1, 1], 6, traffic="batch")
        plan = bench.step()
        computed["batch"] += plan.num_batch_tokens
        computed["online"] += plan.num_tokens - plan.num_batch_tokens
    total = sum(computed.values())
    slack = 16 * max(1, share * budget)
    # One that has a place it is owed may also have the tokens that nobody else can use.
    assert share * total - slack <= computed["batch"] <= share * total + slack + 150


def test_without_a_share_online_traffic_that_takes_it_all_stops_a_batch() -> None:
    bench = Bench(max_batch_tokens=4, max_num_seqs=4)
    batch = bench.add([1, 0], 3, traffic="batch")
    for _ in range(100):
        while bench.scheduler.waiting_of("online") < 4:
            bench.add([0, 1, 0], 4)
        bench.step()
    assert (batch.status, batch.num_computed) == (Status.WAITING, 0)


def test_one_that_holds_a_place_that_batches_are_owed_keeps_it() -> None:
    bench = Bench(max_batch_tokens=8, max_num_seqs=2, batch_share=0.25)
    batch = bench.add([1, 0, 1], 30, traffic="batch")
    for _ in range(200):
        if batch.status is Status.FINISHED:
            break
        while bench.scheduler.waiting_of("online") < 4:
            bench.add([0, 1, 0], 4)
        bench.step()
    assert batch.status is Status.FINISHED
    assert batch.preemptions == 0
    bench.drain()


def test_what_batches_are_owed_keeps_no_more_than_their_share_of_the_places() -> None:
    """Long prompts leave them a credit of many tokens, for which sequences that decode could have every place."""
    bench = Bench(num_blocks=400, prefix_caching=False, max_batch_tokens=64, max_num_seqs=8, batch_share=0.25)
    kept = 0
    for _ in range(60):
        while bench.scheduler.waiting_of("online") < 8:
            bench.add([0] * 40, 1)
        while bench.scheduler.waiting_of("batch") < 8:
            bench.add([1], 200, traffic="batch")
        plan = bench.step()
        assert plan.num_tokens > plan.num_batch_tokens
        kept = max(kept, sum(sequence.kept for sequence in bench.scheduler.running))
    assert kept == 2


def test_decodes_that_do_not_all_fit_take_turns_and_keep_their_blocks() -> None:
    bench = Bench(num_blocks=200, max_num_seqs=16, slo=SloController(tpot=1.0))
    batch = [bench.add([token], 100, traffic="batch") for token in range(10)]
    for _ in range(4):
        bench.step()
    bench.add([11], 60)
    before = [len(sequence.tokens) for sequence in batch]
    rows = [bench.step().num_batch_tokens for _ in range(50)]
    gained = [len(sequence.tokens) - was for sequence, was in zip(batch, before, strict=True)]
    assert 0 < sum(rows[20:]) < 10 * 30
    assert max(gained) - min(gained) <= 1
    assert all(sequence.preemptions == 0 for sequence in batch)


def test_a_step_without_online_sequences_always_computes_something() -> None:
    bench = Bench(slo=SloController(ttft=1e-9, tpot=1e-9))
    for token in range(3):
        bench.add([token] * 5, 4, traffic="batch")
    bench.drain()


def test_a_shrunken_budget_is_shared_in_turns() -> None:
    bench = Bench(max_batch_tokens=4, max_num_seqs=4)
    batch = [bench.add([token], 9, traffic="batch") for token in range(4)]
    bench.step()
    failed = bench.schedule()
    bench.rollback()
    assert bench.scheduler.shrink(failed)
    for _ in range(4):
        bench.step()
    assert [len(sequence.tokens) for sequence in batch] == [4, 4, 4, 4]


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0, float("nan")])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="batch_share"):
        BatchShare(share, 8)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_promotion_needs_an_age(seconds: float) -> None:
    with pytest.raises(ValueError, match="promote_after"):
        Scheduler(BlockManager(1, 1), max_batch_tokens=1, max_num_seqs=1, promote_after=seconds)


@_QUICK
@given(
    share=st.floats(0.01, 0.9),
    steps=st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 1.0)), min_size=1, max_size=60),
)
def test_the_account_is_bounded_and_pays_what_it_owes(share: float, steps: list[tuple[int, float]]) -> None:
    account = BatchShare(share, 64)
    most = max(1, int(2 * share * 64))
    for tokens, taken in steps:
        account.settle(tokens, min(tokens, max(account.due(64), int(taken * tokens))), wanted=True)
        assert 0 <= account.due(64) <= most
    account.settle(10, 0, wanted=False)
    assert account.due(64) == 0


def test_a_shrunken_step_pays_what_is_owed_by_and_by() -> None:
    account = BatchShare(0.05, 512)
    for _ in range(20):
        account.settle(512, 0, wanted=True)
    assert [account.due(tokens) for tokens in (512, 40, 20, 1)] == [51, 4, 2, 1]


def test_a_batch_whose_place_an_online_sequence_waits_for_makes_haste() -> None:
    """Though that one is late already: nothing is won by short steps in which only the batch is computed."""
    bench = Bench(
        num_blocks=99, max_batch_tokens=16, max_num_seqs=1, batch_share=0.05, slo=SloController(ttft=6.0, tpot=4.0)
    )
    bench.add([0] * 9, 30)
    batch = bench.add([1] * 300, 4, traffic="batch")
    while not batch.kept:
        bench.step()
    online, steps = bench.add([0] * 9, 2), 0
    while not online.num_computed:
        bench.step()
        steps += 1
    assert batch.status is Status.FINISHED
    assert steps < 60


def test_counts_are_kept_by_class() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add([0], 5)
    for token in range(3):
        bench.add([token], 5, traffic="batch")
    bench.step()
    counts = [(bench.scheduler.running_of(t), bench.scheduler.waiting_of(t)) for t in ("online", "batch")]
    assert counts == [(1, 0), (1, 2)]
    ended: list[Sequence] = [sequence for sequence in bench.alive if sequence.is_batch]
    for sequence in ended:
        bench.scheduler.finish(sequence)
    assert (bench.scheduler.running_of("batch"), bench.scheduler.waiting_of("batch")) == (0, 0)
