"""A step that was not computed, and how the scheduler finds out which sequence it fails with."""

from __future__ import annotations

from .oracle import Bench


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


def test_a_sequence_without_a_chunk_shares_nothing_of_a_failed_step() -> None:
    """The first scores all that a step may score, so the second has its place and shared blocks, and no chunk."""
    bench = Bench(block_size=4, max_batch_tokens=64)
    bench.scheduler.max_scored = 8
    shared = [0, 1, 1, 0, 1, 0, 0, 1]
    first = bench.add([*shared, *[0] * 12], 0, scored=range(8, 19))
    second = bench.add([*shared, *[1] * 12], 0, scored=range(8, 19))
    scheduler = bench.scheduler
    plan = scheduler.schedule(0.0)
    assert [chunk.sequence for chunk in plan.chunks] == [first]
    assert (second in scheduler.running, second.num_computed) == (True, 8)
    scheduler.rollback(plan)
    assert (scheduler.running, second.num_computed) == ([], 0)
    assert bench.blocks.open([*shared, 5])[1] == 0
