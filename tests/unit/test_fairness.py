"""Fair shares of the engine, between owners and between requests: nobody is crowded out, and nobody starves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.errors import InvalidRequest
from batchwright.request import Flow, Traffic
from batchwright.scheduling import Sequence, Status, StepPlan
from batchwright.scheduling.fairness import Share
from batchwright.scheduling.slo import StepShape

from .oracle import Bench

_ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 3),  # owner
            st.integers(0, 2),  # request
            st.integers(1, 14),  # prompt
            st.integers(1, 6),  # output
            st.sampled_from([1, 5, 9]),
            st.sampled_from(["online", "online", "batch"]),
        ),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.just(("step",)),
        st.just(("step",)),
        st.just(("fail",)),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=examples(25, long=60))
@given(
    actions=_ACTIONS,
    budget=st.integers(3, 20),
    max_num_seqs=st.integers(1, 5),
    num_blocks=st.integers(8, 24),
    share=st.sampled_from([0.0, 0.2]),
    promote_after=st.sampled_from([None, 6.0]),
)
def test_whatever_the_flows_every_slot_holds_what_it_should_and_all_end(
    actions: list[tuple[object, ...]],
    budget: int,
    max_num_seqs: int,
    num_blocks: int,
    share: float,
    promote_after: float | None,
) -> None:
    bench = Bench(
        num_blocks=num_blocks,
        block_size=4,
        max_batch_tokens=budget,
        max_num_seqs=max_num_seqs,
        batch_share=share,
        promote_after=promote_after,
        shared=True,
    )
    for kind, *arguments in actions:
        if kind == "add":
            _add(bench, *arguments)  # type: ignore[arg-type]
        elif kind == "cancel" and bench.alive:
            bench.scheduler.finish(bench.alive[int(str(arguments[0])) % len(bench.alive)])
        elif kind == "step":
            bench.step()
        elif kind == "fail":
            bench.schedule()
            bench.rollback()
    bench.drain()
    for shares in bench.scheduler._places.shares.values():
        assert not shares.contended
        assert shares._root.active_weight == 0.0


def _add(bench: Bench, owner: int, request: int, prompt: int, output: int, priority: int, traffic: Traffic) -> None:
    flow = Flow(f"owner-{owner}", f"{owner}-{request}", 1.0 + owner) if owner else None
    bench.add([owner % 2] * prompt, output, priority=priority, traffic=traffic, flow=flow)


@pytest.mark.parametrize("same_owner", [False, True])
@settings(max_examples=15)
@given(
    sequences=st.integers(30, 60),
    steps=st.integers(1, 12),
    aged=st.booleans(),
    newcomers=st.integers(1, 60),
)
def test_a_newcomer_has_its_prompt_computed_in_the_next_step_beside_few_decodes(
    same_owner: bool, sequences: int, steps: int, aged: bool, newcomers: int
) -> None:
    """Though one request fills all places, has as many waiting, and is old enough to be promoted."""
    bench = Bench(
        num_blocks=800, max_batch_tokens=128, max_num_seqs=32, promote_after=5.0 if aged else None, shared=True
    )
    crowd = Flow("a", "crowd")
    for number in range(sequences):
        bench.add([number % 2, 1], 60, flow=crowd)
    for _ in range(steps):
        bench.step()
    quiet = bench.add([0] * newcomers, 4, flow=Flow("a" if same_owner else "b", "quiet"))
    plan = bench.step()
    [own] = [chunk for chunk in plan.chunks if chunk.sequence is quiet]
    assert own.count >= min(newcomers, 32)
    assert len(plan.chunks) - 1 <= max(16, min(newcomers, 32))


def test_a_step_without_a_newcomer_carries_everybody() -> None:
    bench = Bench(num_blocks=800, max_batch_tokens=64, max_num_seqs=32, shared=True)
    for number in range(31):
        bench.add([number % 2], 60, flow=Flow("a", "crowd"))
    bench.add([0], 60, flow=Flow("b", "quiet"))
    for _ in range(3):
        bench.step()
    assert len(bench.step().chunks) == 32


class _WideBench(Bench):
    """Where sixteen rows more cost little beside what every step costs."""

    def seconds(self, plan: StepPlan) -> float:
        return 20.0 + plan.num_tokens / 2


def test_a_sequence_whose_reader_has_no_text_yet_is_still_a_newcomer() -> None:
    bench = _WideBench(num_blocks=800, max_batch_tokens=64, max_num_seqs=32, shared=True)
    for number in range(40):
        bench.add([number % 2], 60, flow=Flow("a", "crowd"))
    bench.step()
    quiet = bench.add([0, 1, 2], 60, flow=Flow("b", "quiet"))
    quiet.text_pending = True
    for _ in range(8):
        # Its prompt, and seven tokens of which none has a text; longer than that it holds nobody up.
        assert len(bench.step().chunks) == 17
    assert len(bench.step().chunks) == 32
    again = bench.add([0, 1, 2], 60, flow=Flow("b", "again"))
    again.text_pending = True
    assert len(bench.step().chunks) < 20
    again.text_pending = False
    assert len(bench.step().chunks) == 32


@pytest.mark.parametrize(("flow", "most"), [(Flow("a", "crowd"), 36), (None, 64)])
def test_steps_are_short_where_somebody_else_may_come(flow: Flow | None, most: int) -> None:
    bench = Bench(num_blocks=800, max_batch_tokens=64, max_num_seqs=32, shared=flow is not None)
    for number in range(2):
        bench.add([0], 1, flow=flow and Flow("b", str(number)))  # together: another one may come again
    bench.step()
    for number in range(80):
        bench.add([number % 2] * 20, 20, flow=flow)
    tokens = [bench.step().num_tokens for _ in range(60)]
    assert most // 2 <= max(tokens) <= most + 4


def test_online_prompts_leave_nothing_to_batches() -> None:
    bench = Bench(num_blocks=800, max_batch_tokens=64, max_num_seqs=32, shared=True)
    for number in range(30):
        bench.add([number % 2] * 20, 20, traffic="batch", flow=Flow("a", "lines"))
    for number in range(30):
        bench.add([number % 2] * 20, 20, flow=Flow("b", "crowd"))
    plan = bench.step()
    assert plan.num_tokens == 64
    assert plan.num_batch_tokens == 0


def test_newcomers_hold_up_nobody_of_a_better_priority() -> None:
    bench = Bench(num_blocks=800, max_batch_tokens=64, max_num_seqs=48, shared=True)
    urgent = [bench.add([number % 2], 60, priority=0, flow=Flow("a", "crowd")) for number in range(40)]
    bench.step()
    bench.add([0] * 20, 4, priority=9, flow=Flow("b", "quiet"))
    plan = bench.step()
    assert {id(chunk.sequence) for chunk in plan.chunks} >= set(map(id, urgent))


def test_a_place_is_taken_from_the_largest_request_of_an_owner() -> None:
    """However many short requests of others come, its small one goes on."""
    bench = Bench(num_blocks=800, max_batch_tokens=64, max_num_seqs=8, shared=True)
    for number in range(20):
        bench.add([number % 2], 60, flow=Flow("b", "large"))
    bench.step()
    small = bench.add([1, 0], 60, flow=Flow("b", "small"))
    bench.step()
    for number in range(20):
        bench.add([1], 1, flow=Flow("a", f"short-{number}"))
        bench.step()
    assert small.preemptions == 0
    assert small.num_generated >= 20


def test_thousands_that_wait_cost_a_step_no_more_than_a_few() -> None:
    """By the number of turns that are looked at, not by time."""
    looks = 0

    def look(share: Share) -> tuple[float, ...]:
        nonlocal looks
        looks += 1
        return turn(share)

    bench = Bench(num_blocks=800, max_batch_tokens=64, max_num_seqs=8, shared=True)
    queue = bench.scheduler._places.waiting["online"]
    turn, queue._turn_of_request = queue._turn_of_request, look  # type: ignore[assignment,method-assign]
    for number in range(2000):
        bench.add([number % 2], 4, flow=Flow(str(number % 5), str(number)))
    bench.step()
    for _ in range(20):
        looks = 0
        bench.step()
        assert looks < 500


def test_decodes_that_stay_out_of_newcomers_steps_take_turns() -> None:
    """A stream of newcomers slows a crowd down to as many rows as the newcomers have, and stops none of it."""
    bench = _WideBench(num_blocks=800, max_batch_tokens=64, max_num_seqs=40, shared=True)
    crowd = [bench.add([number % 2], 30, flow=Flow("a", "crowd")) for number in range(32)]
    bench.step()
    for number in range(60):
        bench.add([1, 0], 1, flow=Flow("b", f"quiet-{number}"))
        bench.step()
    generated = [sequence.num_generated for sequence in crowd]
    assert min(generated) >= 28
    assert max(generated) - min(generated) <= 2


@settings(max_examples=8)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    later=st.integers(0, 20),
    prompts=st.lists(st.integers(1, 12), min_size=4, max_size=4),
)
def test_places_settle_in_proportion_to_the_weights_though_one_came_first(
    weights: list[float], later: int, prompts: list[int]
) -> None:
    bench = Bench(num_blocks=2000, max_batch_tokens=64, max_num_seqs=24, shared=True)
    for owner, weight in enumerate(weights):
        for number in range(40):
            bench.add([number % 2] * prompts[owner], 400, flow=Flow(str(owner), str(owner), weight))
        for _ in range(later):
            bench.step()
    for _ in range(30):
        bench.step()
    fair = [24 * weight / sum(weights) for weight in weights]
    places = [
        sum(each.flow == Flow(str(owner), str(owner), weight) for each in bench.scheduler.running)
        for owner, weight in enumerate(weights)
    ]
    assert all(abs(had - due) <= len(weights) for had, due in zip(places, fair, strict=True))
    before = bench.preemptions
    for _ in range(20):
        bench.step()
    assert bench.preemptions == before  # settled: nobody loses a place any more


def test_long_prompts_of_one_owner_leave_half_of_the_tokens_to_another() -> None:
    bench = Bench(num_blocks=4000, max_batch_tokens=32, max_num_seqs=64, prefix_caching=False, shared=True)
    for number in range(40):
        bench.add([number % 2] * 320, 1, flow=Flow("long", f"long-{number}"))
    for _ in range(5):
        bench.step()
    prompt = 160  # five steps alone
    quiet = bench.add([1] * prompt, 1, flow=Flow("quiet", "quiet"))
    steps = 0
    while quiet.status is not Status.FINISHED:
        bench.step()
        steps += 1
    assert steps <= 2 * 5 + 1
    computed: dict[str, int] = {"long": 0, "quiet": 0}
    for number in range(20):
        bench.add([0] * prompt, 1, flow=Flow("quiet", f"quiet-{number}"))
    for _ in range(60):
        _count(bench.step(), computed)
    assert abs(computed["long"] - computed["quiet"]) <= 2 * 32 + prompt


@pytest.mark.parametrize("same_owner", [False, True])
def test_the_first_newcomer_beside_long_prompts_has_the_next_step(same_owner: bool) -> None:
    """Nothing was counted while one request was alone: neither has been served more."""
    bench = Bench(num_blocks=4000, max_batch_tokens=64, max_num_seqs=64, prefix_caching=False, shared=True)
    for number in range(40):
        bench.add([number % 2] * 320, 1, flow=Flow("long", "long"))
    for _ in range(3):
        bench.step()
    quiet = bench.add([1] * 20, 4, flow=Flow("long" if same_owner else "quiet", "quiet"))
    bench.step()
    assert quiet.num_generated == 1


class _DeepBench(Bench):
    """Where the attention of a prompt's last tokens costs as much as all else of them."""

    def seconds(self, plan: StepPlan) -> float:
        shape = StepShape.of(plan.chunks)
        return 20.0 + shape.num_tokens + (shape.prefill_pairs + shape.decode_keys) / 2000


def test_steps_with_deep_prompts_are_no_longer_than_others() -> None:
    """Where requests say whose they are, somebody else may come in the midst of a step."""
    bench = _DeepBench(num_blocks=4000, max_batch_tokens=512, max_num_seqs=8, prefix_caching=False, shared=True)
    for number in range(6):
        bench.add([number % 2] * 2000, 1, flow=Flow("long", f"long-{number}"))
    plans: list[StepPlan] = []
    while bench.scheduler.has_work:
        plans.append(bench.step())
    settled = plans[15:-10]
    assert max(map(bench.seconds, settled)) <= 1.1 * (20 + 256 * (1 + 128 / 2000))
    assert min(plan.num_tokens for plan in settled) >= 64  # each step reads the weights
    assert len(settled) > 30


def test_long_contexts_lengthen_the_step_of_a_newcomer_by_no_more_than_half() -> None:
    bench = _DeepBench(num_blocks=4000, max_batch_tokens=128, max_num_seqs=64, prefix_caching=False, shared=True)
    crowd = [bench.add([number % 2] * 200, 200, flow=Flow("a", "crowd")) for number in range(16)]
    tried = 0
    for number in range(90):
        quiet = bench.add([0, 1] * (2 + number % 11), 1, flow=Flow("b", f"quiet-{number}"))
        plan = bench.step()
        if all(each.num_generated for each in crowd):  # before, the cost model is being fitted
            alone = bench.seconds(StepPlan([chunk for chunk in plan.chunks if chunk.sequence is quiet]))
            assert alone < bench.seconds(plan) <= 1.5 * alone
            tried += 1
        bench.step()
        bench.step()
    assert tried > 10


def test_whoever_is_alone_has_whole_steps() -> None:
    bench = Bench(num_blocks=4000, max_batch_tokens=512, max_num_seqs=8, prefix_caching=False, shared=True)
    bench.add([0] * 2000, 1, flow=Flow("alone", "first"))
    assert bench.step().num_tokens == 512
    bench.add([1] * 8, 1, flow=Flow("quiet", "second"))
    bench.step()
    assert bench.step().num_tokens <= 256  # another one may come again


def _count(plan: StepPlan, computed: dict[str, int]) -> None:
    for chunk in plan.chunks:
        assert chunk.sequence.flow is not None
        computed[chunk.sequence.flow.owner] += chunk.count


def test_nobody_saves_up_a_claim_by_sending_nothing() -> None:
    bench = Bench(num_blocks=4000, max_batch_tokens=32, max_num_seqs=64, prefix_caching=False, shared=True)
    served: dict[str, int] = {"busy": 0, "other": 0, "late": 0}
    bench.add([0] * 8, 2, flow=Flow("late", "first"))
    for number in range(200):
        bench.add([number % 2] * 64, 1, flow=Flow("busy", f"busy-{number}"))
        bench.add([number % 2] * 64, 1, flow=Flow("other", f"other-{number}"))
    for _ in range(200):
        bench.step()
    for number in range(100):
        bench.add([number % 2] * 64, 1, flow=Flow("late", f"late-{number}"))
    for _ in range(90):
        _count(bench.step(), served)
    third = sum(served.values()) / 3
    assert all(abs(tokens - third) <= 2 * 64 + 32 for tokens in served.values())


def test_a_request_of_low_priority_is_not_starved_by_another_owners() -> None:
    bench = Bench(num_blocks=100, max_batch_tokens=16, max_num_seqs=2, promote_after=20.0, shared=True)
    patient = bench.add([0, 1], 3, priority=9, flow=Flow("patient", "patient"))
    for number in range(60):
        for part in range(3):
            bench.add([1, 0], 6, priority=1, flow=Flow("urgent", f"{number}-{part}"))
        bench.step()
    assert patient.status is Status.FINISHED


def test_a_higher_priority_still_takes_the_place_of_another_owners() -> None:
    bench = Bench(num_blocks=100, max_batch_tokens=16, max_num_seqs=1, shared=True)
    low = bench.add([0], 9, priority=5, flow=Flow("a", "low"))
    bench.step()
    high = bench.add([1], 2, priority=1, flow=Flow("b", "high"))
    plan = bench.step()
    assert (plan.preempted, [chunk.sequence for chunk in plan.chunks]) == ([low], [high])


def test_the_priority_of_a_batch_line_counts_among_the_lines_of_its_own_tenant_only() -> None:
    bench = Bench(num_blocks=400, max_batch_tokens=64, max_num_seqs=8, shared=True)
    for number in range(40):
        bench.add([number % 2], 20, priority=0, traffic="batch", flow=Flow("greedy", ""))
    bench.step()
    modest = [bench.add([1], 20, priority=9, traffic="batch", flow=Flow("modest", "")) for _ in range(40)]
    for _ in range(45):
        bench.step()
    assert sum(sequence.admitted for sequence in modest) >= 6


def test_blocks_are_taken_from_the_one_who_holds_most_of_the_places() -> None:
    bench = Bench(num_blocks=12, block_size=2, max_batch_tokens=32, max_num_seqs=8, prefix_caching=False, shared=True)
    for number in range(5):
        bench.add([number], 16, priority=5, flow=Flow("crowd", "crowd"))
    quiet = bench.add([9], 9, flow=Flow("quiet", "quiet"))
    while quiet.status is not Status.FINISHED:
        bench.step()
    assert quiet.preemptions == 0
    assert bench.preemptions > 0
    bench.drain()


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan, "1"])
def test_a_weight_is_a_number_above_0(weight: object) -> None:
    with pytest.raises(InvalidRequest, match="weight"):
        Flow("a", "b", weight)  # type: ignore[arg-type]


def test_sequences_without_a_flow_are_one_among_others() -> None:
    bench = Bench(num_blocks=400, max_batch_tokens=64, max_num_seqs=8, shared=True)
    nameless = [bench.add([0], 50) for _ in range(20)]
    bench.step()
    bench.add([1], 50, flow=Flow("a", "a"))
    plan = bench.step()
    assert len(plan.preempted) == 1
    assert isinstance(plan.preempted[0], Sequence)
    assert plan.preempted[0] in nameless
