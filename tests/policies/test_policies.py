"""What each policy promises, without an event loop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.policies import (
    AtOnce,
    Backlog,
    BatchPolicy,
    BySize,
    Dispatch,
    FairShare,
    Fifo,
    Goodput,
    Item,
    LatencyModel,
    LikeLengths,
    MaxWait,
    Order,
    Policy,
    Reason,
    Shape,
    TargetLatency,
    Timing,
    Urgency,
    Wait,
    Window,
    adaptive,
    auto,
    length_aware,
    priority,
    simple,
    window,
)
from batchwright.policies.lengths import divide

_QUICK = settings(max_examples=examples(40, long=100))


def _filled(policy: BatchPolicy | Backlog, arrivals: list[float], length: int = 1) -> Backlog:
    waiting = policy if isinstance(policy, Backlog) else Backlog(policy)
    waiting.add([Item(arrival, length) for arrival in arrivals])
    return waiting


def _learned(base: float = 0.02, by_cell: float = 2e-5) -> LatencyModel:
    model = LatencyModel()
    rng = random.Random(1)
    for _ in range(60):
        count = rng.randint(1, 64)
        cells = count * rng.randint(8, 2048)
        model.observe(cells, count, base + by_cell * cells)
    return model


def _dispatched(policy: Backlog, now: float, *, drain: bool = False) -> tuple[int, Reason]:
    decision = policy.decide(now, drain=drain)
    assert isinstance(decision, Dispatch)
    return len(decision.items), decision.reason


def test_nothing_waits_for_nothing() -> None:
    assert Backlog(simple()).decide(5.0) == Wait(math.inf)


def test_fixed_size_goes_when_full() -> None:
    assert _dispatched(_filled(simple(3, 0.1), [0.0] * 4), 0.0) == (3, Reason.FULL)


def test_fixed_size_goes_when_its_oldest_has_waited_enough() -> None:
    policy = _filled(simple(3, 0.1), [1.0, 1.05])
    assert policy.decide(1.05) == Wait(1.1)
    assert _dispatched(policy, 1.1) == (2, Reason.MAX_WAIT)


def test_the_wait_is_that_of_the_oldest_that_is_left() -> None:
    policy = Backlog(simple(3, 0.1))
    oldest = Item(1.0)
    policy.add((oldest,))
    _filled(policy, [1.05])
    assert policy.remove(oldest)
    assert not policy.remove(oldest)
    assert policy.decide(1.1) == Wait(1.05 + 0.1)


def test_a_window_opens_with_its_first_request_and_is_not_reset_by_the_next() -> None:
    policy = _filled(window(0.05, 8), [1.0, 1.02, 1.04])
    assert policy.decide(1.04) == Wait(1.05)
    assert _dispatched(policy, 1.05) == (3, Reason.WINDOW)


def test_a_window_stays_where_it_is_when_its_first_request_leaves() -> None:
    policy = Backlog(window(0.05, 8))
    first = Item(1.0)
    policy.add((first,))
    _filled(policy, [1.04])
    policy.remove(first)
    assert policy.decide(1.04) == Wait(1.05)


def test_the_next_window_begins_with_the_first_request_after_the_last() -> None:
    policy = _filled(window(0.05, 8), [1.0])
    assert _dispatched(policy, 1.05) == (1, Reason.WINDOW)
    _filled(policy, [1.07])
    assert policy.decide(1.07) == Wait(1.07 + 0.05)


def test_a_window_goes_in_batches_and_its_rest_is_not_held_for_another_window() -> None:
    policy = _filled(window(0.05, 4), [1.0] * 10)
    assert [_dispatched(policy, 1.05) for _ in range(3)] == [(4, Reason.FULL), (4, Reason.FULL), (2, Reason.WINDOW)]


def test_a_request_with_a_deadline_is_not_held_beyond_it() -> None:
    policy = Backlog(simple(8, 10.0))
    for count in (4, *[1, 2, 4] * 100):
        policy.observe(count, count, count, 0.5)
    policy.add((Item(1.0, due=3.0),))
    decision = policy.decide(1.0)
    assert isinstance(decision, Wait)
    assert decision.until == pytest.approx(2.5, abs=0.05)
    assert decision.until < 2.5
    assert _dispatched(policy, decision.until) == (1, Reason.DEADLINE)


def test_a_request_with_a_deadline_goes_at_once_while_the_model_is_unknown() -> None:
    policy = Backlog(simple(8, 10.0))
    policy.add((Item(1.0, due=3.0),))
    assert _dispatched(policy, 1.0) == (1, Reason.DEADLINE)


def test_draining_waits_for_nothing() -> None:
    assert _dispatched(_filled(simple(3, 10.0), [0.0]), 0.0, drain=True) == (1, Reason.DRAIN)


@pytest.mark.parametrize("make", [auto, adaptive, length_aware])
def test_nothing_is_held_back_from_a_free_model(make: Callable[[], Policy]) -> None:
    assert _dispatched(_filled(make(), [0.0], length=7), 0.0) == (1, Reason.IDLE)


def test_adaptive_takes_half_the_target_and_all_of_it_when_more_wait() -> None:
    shape = TargetLatency(0.205, inner=BySize(64))
    latency = LatencyModel()
    for count in range(1, 33):
        latency.observe(count, count, 0.02 + 0.01 * count)
    few, _ = shape.choose([Item(0.0) for _ in range(8)], 0.0, latency)
    many, full = shape.choose([Item(0.0) for _ in range(60)], 0.0, latency)
    assert (len(few), len(many), full) == (8, 18, True)


def test_adaptive_follows_a_burst_of_four_times_the_load_within_ten_batches() -> None:
    """80 requests a second, then 320; a batch takes 40 ms and 1 ms for each request."""
    policy = Backlog(adaptive(0.1, 1, 64))
    now, served, sizes, waits = 0.0, 0, list[int](), list[float]()
    arrivals = [i / 80 for i in range(400)] + [5.0 + i / 320 for i in range(1600)]
    for arrival in arrivals:
        while now < arrival:
            decision = policy.decide(now) if len(policy) else None
            if not isinstance(decision, Dispatch):
                now = arrival
                break
            count = len(decision.items)
            now += 0.04 + 0.001 * count
            policy.observe(count, count, count, 0.04 + 0.001 * count)
            if decision.items[0].arrival >= 5.0:
                sizes.append(count)
                waits.append(now - decision.items[0].arrival)
            served += count
        policy.add((Item(arrival),))
    # 320 a second need 0.04 + 0.001 n = n / 320, so batches of 19.
    assert max(sizes[:10]) >= 19
    assert max(waits[10:]) <= 0.125


def test_adaptive_goes_at_most_twice_as_far_as_it_has_seen() -> None:
    policy = _filled(adaptive(10.0, 1, 32), [0.0] * 63)
    sizes = []
    while len(policy):
        count, _ = _dispatched(policy, 0.0)
        policy.observe(count, count, count, 0.001)
        sizes.append(count)
    assert sizes == [1, 2, 4, 8, 16, 32]


def test_adaptive_sends_the_smallest_batch_though_it_misses_the_target() -> None:
    policy = Backlog(adaptive(0.01, 4, 32))
    for count in (4, 8, 8):
        policy.observe(count, count, count, 5.0)
    assert _dispatched(_filled(policy, [0.0] * 20), 0.0) == (4, Reason.FULL)


def test_like_lengths_go_together_and_a_rare_one_is_not_stranded() -> None:
    policy = Backlog(length_aware(4096, 8))
    policy.latency = _learned()
    long = Item(0.0, 2000)
    policy.add((long,))
    _filled(policy, [0.1] * 8, length=20)
    first, second = policy.decide(0.1), policy.decide(0.2)
    assert isinstance(first, Dispatch)
    assert isinstance(second, Dispatch)
    assert list(first.items) == [long]
    assert (len(second.items), second.reason) == (8, Reason.FULL)


def test_a_request_larger_than_the_whole_budget_goes_alone() -> None:
    policy = _filled(length_aware(100, 8), [0.0], length=5000)
    _filled(policy, [0.0] * 3, length=10)
    sizes = []
    while len(policy):
        sizes.append(_dispatched(policy, 0.0)[0])
    assert sizes == [1, 3]


@_QUICK
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=80),
    budget=st.integers(1, 1000),
    size=st.integers(1, 20),
    make=st.sampled_from([LikeLengths, Goodput]),
    learned=st.booleans(),
)
def test_no_batch_exceeds_its_limits_and_all_are_served(
    lengths: list[int], budget: int, size: int, make: Callable[[int, int], LikeLengths | Goodput], learned: bool
) -> None:
    policy = Backlog(Policy(make(size, budget)))
    if learned:
        policy.latency = _learned()
    for length in lengths:
        policy.add((Item(0.0, length),))
    served: list[int] = []
    while isinstance(decision := policy.decide(0.0), Dispatch):
        count, longest = len(decision.items), max(item.length for item in decision.items)
        assert 1 <= count <= size
        assert count == 1 or count * longest <= budget
        served += [item.length for item in decision.items]
    assert sorted(served) == sorted(lengths)


@_QUICK
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    size=st.integers(1, 5),
    base=st.floats(0.0, 2.0),
    by_item=st.floats(0.0, 1.0),
)
def test_the_division_is_the_best_there_is(lengths: list[int], size: int, base: float, by_item: float) -> None:
    latency = LatencyModel()
    latency.batches, latency.coefficients = 1, (base, 0.01, by_item)

    def best(rest: tuple[int, ...]) -> float:
        return min(
            (
                base + (0.01 * rest[end - 1] + by_item) * end + best(rest[end:])
                for end in range(1, min(size, len(rest)) + 1)
            ),
            default=0.0,
        )

    items = [Item(0.0, length) for length in lengths]
    spent = 0.0
    while items:
        # Batches may share requests at their borders, so one is taken and the rest divided again.
        batch, _ = divide(items, size, None, latency)[-1]
        spent += base + (0.01 * max(item.length for item in batch) + by_item) * len(batch)
        items = [item for item in items if item not in batch]
    assert spent == pytest.approx(best(tuple(sorted(lengths))))


def test_the_default_serves_in_time_what_can_be_and_leaves_the_hopeless() -> None:
    policy = Backlog(auto())
    policy.latency = _learned()
    hopeless = Item(0.0, 2000, due=0.03)
    policy.add((hopeless,))
    hopeful = [Item(0.0, 50, due=0.05) for _ in range(4)]
    for item in hopeful:
        policy.add((item,))
    decision = policy.decide(0.0)
    assert isinstance(decision, Dispatch)
    assert list(decision.items) == hopeful


def test_the_default_shrinks_a_batch_until_all_in_it_are_in_time() -> None:
    policy = Backlog(auto())
    policy.latency = _learned()
    for _ in range(64):
        policy.add((Item(0.0, 100, due=0.06),))
    # 0.02 + 2e-5 * 100 * n <= 0.06
    count, _ = _dispatched(policy, 0.0)
    assert count in (19, 20)


def test_the_default_saves_those_whose_deadline_is_near_before_cheaper_ones_that_can_wait() -> None:
    policy = Backlog(auto())
    policy.latency = _learned()
    for _ in range(12):
        policy.add((Item(0.0, 20, due=10.0),))
    near = [Item(0.0, 1000, due=0.1) for _ in range(3)]
    for item in near:
        policy.add((item,))
    decision = policy.decide(0.0)
    assert isinstance(decision, Dispatch)
    assert set(decision.items) == set(near)


def test_the_default_does_not_starve_a_long_request_behind_short_ones() -> None:
    policy = Backlog(auto(8))
    policy.latency = _learned()
    long = Item(0.0, 2000)
    policy.add((long,))
    now = 0.0
    for _ in range(200):
        while len(policy) < 20:
            policy.add((Item(now, 20),))
        decision = policy.decide(now)
        assert isinstance(decision, Dispatch)
        if long in decision.items:
            return
        now += 0.0232
    pytest.fail("it was starved")


def test_the_default_keeps_priorities() -> None:
    policy = Backlog(auto(4))
    policy.latency = _learned()
    for _ in range(20):
        policy.add((Item(0.0, 20, priority=9),))
    urgent = Item(0.1, 1500, priority=0)
    policy.add((urgent,))
    decision = policy.decide(0.1)
    assert isinstance(decision, Dispatch)
    assert urgent in decision.items


def test_predictions_grow_with_what_waits() -> None:
    policy = Backlog(simple(4, 0.0))
    assert policy.predict() is None
    for count in (1, 2, 4, 4, 3):
        policy.observe(10 * count, 10 * count, count, 0.1 + 0.01 * count)
    _filled(policy, [0.0] * 7, length=10)
    last = Item(0.0, 10)
    policy.add((last,))
    assert policy.predict(last) == policy.predict() == pytest.approx(0.28)


def test_a_prediction_for_an_item_counts_those_before_it_and_no_padding() -> None:
    policy = Backlog(priority(2, 0.0))
    for count in (1, 2, 4, 4, 3):
        # A second for each cell, three times as many cells as tokens.
        policy.observe(30 * count, 10 * count, count, 30.0 * count)
    short, long, last = (
        Item(0.0, 5, priority=0),
        [Item(0.0, 1000, priority=9) for _ in range(4)],
        Item(1.0, 7, priority=0),
    )
    for item in (short, *long, last):
        policy.add((item,))
    assert policy.predict(last) == pytest.approx(12.0)
    assert policy.predict(long[1]) == pytest.approx(2012.0)
    bound = policy.predict()
    assert bound is not None
    assert bound > 4012.0
    free = Backlog(length_aware(None, 2))
    free.latency = policy.latency
    for item in (short, last):
        free.add((item,))
    assert free.predict(last) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: simple(0), "max_batch_size"),
        (lambda: simple(2, -1.0), "max_wait"),
        (lambda: simple(2, float("nan")), "max_wait"),
        (lambda: window(float("inf")), "window"),
        (lambda: adaptive(0.0), "target_latency"),
        (lambda: adaptive(0.1, 0), "min_batch_size"),
        (lambda: adaptive(0.1, 9, 8), "min_batch_size"),
        (lambda: priority(aging=0.0), "aging"),
        (lambda: length_aware(0), "max_batch_tokens"),
        (lambda: auto(1.5), "max_batch_size"),  # type: ignore[arg-type]
        (lambda: LatencyModel(0), "memory"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        make()


ORDERS: list[Callable[[], Order]] = [Fifo, Urgency, FairShare]
SHAPES: list[Callable[[], Shape]] = [
    lambda: BySize(3),
    lambda: LikeLengths(4, 200),
    lambda: Goodput(4, 200),
    lambda: TargetLatency(0.05, inner=BySize(4)),
    lambda: TargetLatency(0.05, min_batch_size=2, inner=LikeLengths(4)),
]
TIMINGS: list[Callable[[], Timing]] = [AtOnce, lambda: MaxWait(0.3), lambda: Window(0.2)]


@settings(max_examples=examples(100, long=300))
@given(data=st.data())
def test_every_composition_serves_each_request_once(data: st.DataObject) -> None:
    order, timing = data.draw(st.sampled_from(ORDERS))(), data.draw(st.sampled_from(TIMINGS))()
    policy = Backlog(Policy(data.draw(st.sampled_from(SHAPES))(), order=order, timing=timing))
    waiting: dict[Item, None] = {}
    now = 0.0
    for move in data.draw(st.lists(st.sampled_from(["add", "add", "add", "remove", "decide"]), max_size=40)):
        now += data.draw(st.sampled_from([0.0, 0.05, 0.3]))
        if move == "add":
            due = data.draw(st.sampled_from([math.inf, now + 0.1, now + 1.0]))
            item = Item(now, data.draw(st.integers(0, 300)), priority=data.draw(st.integers(0, 9)), due=due)
            policy.add((item,))
            waiting[item] = None
        elif move == "remove" and waiting:
            item = data.draw(st.sampled_from(list(waiting)))
            assert policy.remove(item)
            del waiting[item]
        elif move == "decide":
            _take(policy, now, waiting)
        assert len(policy) == len(waiting)
    while waiting:
        until = _take(policy, now, waiting)
        # What is held back is let go in the end, without anything else happening.
        assert now < until < math.inf or until == -math.inf
        now = max(now, until)
    assert policy.decide(now) == Wait(math.inf)


def _take(policy: Backlog, now: float, waiting: dict[Item, None]) -> float:
    """When to ask again, negative infinity after a dispatch."""
    decision = policy.decide(now)
    if isinstance(decision, Wait):
        return decision.until
    assert decision.items
    for item in decision.items:
        del waiting[item]
    cells = max(item.length for item in decision.items) * len(decision.items)
    tokens = sum(item.length for item in decision.items)
    policy.observe(cells, tokens, len(decision.items), 0.01 + 1e-4 * cells)
    return -math.inf
