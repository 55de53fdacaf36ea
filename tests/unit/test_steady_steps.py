"""How many steps are known to be alike, so that they need one plan."""

from __future__ import annotations

import pytest

from batchwright.kv import BlockManager
from batchwright.request import Flow
from batchwright.scheduling import Scheduler, SloController, repeated

from .oracle import Bench


def decoding(bench: Bench, *outputs: int) -> None:
    """Add sequences with so many tokens to come, and compute their prompts."""
    for output in outputs:
        bench.add([0, 1, 0, 1, 0], output, traffic="batch")
    bench.step()


def steady(bench: Bench, most: int = 100) -> int:
    return bench.scheduler.reserve_steady_steps(bench.schedule(), most)


def test_steps_are_alike_until_the_first_sequence_has_all_its_tokens() -> None:
    bench = Bench()
    decoding(bench, 30, 12, 20)
    assert steady(bench) == 11  # the prompt's step chose one of 12
    assert bench.scheduler.reserve_steady_steps(bench.plan, 4) == 4


def test_a_prompt_is_not_like_its_first_decode() -> None:
    bench = Bench()
    bench.add([0, 1, 0], 30, traffic="batch")
    assert steady(bench) == 1


def test_a_prompt_of_one_token_is_no_decode() -> None:
    bench = Bench()
    bench.add([0], 30, traffic="batch")
    assert steady(bench) == 1


def test_whoever_waits_for_a_place_changes_nothing_until_one_is_free() -> None:
    bench = Bench(max_num_seqs=2)
    decoding(bench, 9, 9, 9)
    assert bench.scheduler.num_waiting == 1
    assert steady(bench) == 8


def test_blocks_are_taken_only_while_there_are_some() -> None:
    bench = Bench(num_blocks=6, block_size=4, prefix_caching=False)
    decoding(bench, 12, 12)  # two blocks each; two are free
    assert bench.blocks.num_free == 2
    assert steady(bench) == 5
    assert bench.blocks.num_free == 0


def test_a_block_that_one_sequence_has_to_spare_is_none_that_another_lacks() -> None:
    bench = Bench(num_blocks=7, block_size=4, prefix_caching=False)
    decoding(bench, 12, 12)
    rich, poor = bench.scheduler.running
    assert bench.blocks.grow(rich.table, 4 * bench.size)
    assert bench.blocks.num_free == 1
    assert steady(bench) == 5
    assert (len(rich.table), len(poor.table)) == (4, 3)


def test_who_waits_for_blocks_may_be_admitted_after_any_step() -> None:
    bench = Bench(num_blocks=6, block_size=4, prefix_caching=False)
    decoding(bench, 12, 12, 12)
    assert bench.scheduler.num_waiting == 1
    assert steady(bench) == 1


@pytest.mark.parametrize("flows", [1, 2])
def test_requests_that_share_the_engine_are_planned_step_by_step(flows: int) -> None:
    bench = Bench(shared=True)
    for number in range(4):
        bench.add([0, 1, number], 20, flow=Flow("one", f"request {number % flows}"))
    bench.step()
    assert (steady(bench) > 1) == (flows == 1)


def test_an_slo_is_kept_step_by_step() -> None:
    bench = Bench(slo=SloController(tpot=0.5))
    decoding(bench, 30)
    assert steady(bench) == 1


def test_drafts_are_looked_for_in_every_step() -> None:
    for rows, expected in ((0, 29), (1, 29), (8, 1)):
        bench = Bench(draft_rows=rows)
        decoding(bench, 30)
        plan = bench.schedule()
        for chunk in plan.chunks:
            chunk.drafts = []
        assert bench.scheduler.reserve_steady_steps(plan, 100) == expected


def test_smaller_steps_after_a_failure_grow_again_step_by_step() -> None:
    bench = Bench()
    decoding(bench, 30, 30)
    plan = bench.schedule()
    bench.scheduler.shrink(plan)
    bench.rollback()
    assert steady(bench) == 1


def test_the_next_event_is_a_deadline_or_the_end_of_a_long_wait() -> None:
    scheduler = Scheduler(BlockManager(64, 4), max_batch_tokens=64, max_num_seqs=4, promote_after=None)
    assert scheduler.next_event() == float("inf")
    bench = Bench(promote_after=20.0)
    bench.add([0, 1], 30, deadline=50.0)
    assert bench.scheduler.next_event() == 20.0
    bench.now = 21.0
    bench.step()
    assert bench.scheduler.next_event() == 50.0


def test_a_repeated_plan_has_the_next_token_of_each_sequence() -> None:
    bench = Bench()
    decoding(bench, 30, 30)
    plan = bench.schedule()
    again = [(each.sequence, each.start, each.count) for each in repeated(plan).chunks]
    assert again == [(each.sequence, each.start + 1, 1) for each in plan.chunks]
