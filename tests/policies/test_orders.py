"""Who comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.policies import (
    Backlog,
    BatchPolicy,
    BySize,
    Dispatch,
    FairShare,
    Item,
    Order,
    Policy,
    Urgency,
    auto,
    length_aware,
)
from batchwright.policies.auto import Goodput
from batchwright.policies.backlog import SortedItems
from batchwright.policies.orders import EvenBatches

_QUICK = settings(max_examples=examples(60, long=150))


def _served(order: Order, items: list[Item], size: int = 1) -> list[Item]:
    """All of `items`, which are there at once, in the order in which they are dispatched."""
    policy = Backlog(Policy(BySize(size), order=order))
    for item in items:
        policy.add((item,))
    served: list[Item] = []
    while isinstance(decision := policy.decide(0.0), Dispatch):
        served += decision.items
    return served


def test_the_lowest_priority_number_goes_first_and_within_one_the_first_to_come() -> None:
    items = [Item(0.0, priority=priority) for priority in (5, 1, 5, 0, 1, 5)]
    assert _served(Urgency(), items) == [items[i] for i in (3, 1, 4, 0, 2, 5)]


@_QUICK
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 3)), max_size=40))
def test_first_come_first_served_within_each_priority(arrivals: list[tuple[float, int]]) -> None:
    items = [Item(arrival, priority=priority) for arrival, priority in sorted(arrivals)]
    served = _served(Urgency(), items)
    for level in range(4):
        assert [item for item in served if item.priority == level] == [i for i in items if i.priority == level]


def test_a_low_priority_is_not_starved_by_an_endless_stream_of_a_high_one() -> None:
    policy = Backlog(Policy(BySize(1), order=Urgency(aging=10.0)))
    patient = Item(0.0, priority=9)
    policy.add((patient,))
    for second in range(1000):
        policy.add((Item(float(second), priority=0),))
        decision = policy.decide(float(second))
        assert isinstance(decision, Dispatch)
        if decision.items[0] is patient:
            assert second == 90
            return
    pytest.fail("it was starved")


def test_the_nearest_deadline_goes_first_within_a_priority_and_never_before_the_next() -> None:
    urgent = Item(0.0, priority=4)
    first, second = Item(0.0), Item(0.0, due=2.0)
    third = Item(0.0, due=1.0)
    assert _served(Urgency(), [first, second, third, urgent]) == [urgent, third, second, first]


def test_a_tenant_that_floods_does_not_delay_another() -> None:
    flood = [Item(0.0, tenant="a") for _ in range(100)]
    other = [Item(0.0, tenant="b") for _ in range(3)]
    served = _served(FairShare(), flood + other)
    assert [served.index(item) for item in other] == [1, 3, 5]


@_QUICK
@given(
    lengths=st.lists(st.tuples(st.booleans(), st.integers(1, 50)), min_size=1, max_size=60),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_shares_differ_from_the_weights_by_a_request_of_each_at_most(
    lengths: list[tuple[bool, int]], weight: float
) -> None:
    weights: dict[Hashable, float] = {True: weight, False: 1.0}
    items = [Item(0.0, length, tenant=tenant) for tenant, length in lengths]
    waiting = dict.fromkeys(items)
    given_to = {True: 0.0, False: 0.0}
    for item in _served(FairShare(weights), items):
        del waiting[item]
        given_to[bool(item.tenant)] += item.length / weights[bool(item.tenant)]
        if {other.tenant for other in waiting} == {True, False}:
            assert abs(given_to[True] - given_to[False]) <= 50 / weight + 50


def test_a_tenant_that_was_silent_has_saved_up_nothing() -> None:
    policy = Backlog(Policy(BySize(1), order=FairShare()))
    for _ in range(50):
        policy.add((Item(0.0, tenant="a"),))
    for _ in range(40):
        policy.decide(0.0)
    late = [Item(1.0, tenant="b") for _ in range(5)]
    for item in late:
        policy.add((item,))
    tenants = []
    while isinstance(decision := policy.decide(1.0), Dispatch):
        tenants.append(decision.items[0].tenant)
    assert tenants[:8] in (["b", "a"] * 4, ["a", "b"] * 4)


def test_tenants_that_are_gone_are_forgotten() -> None:
    order = FairShare()
    policy = Backlog(Policy(BySize(1), order=order))
    for number in range(5000):
        policy.add((Item(0.0, tenant=number),))
        policy.decide(0.0)
    assert len(order._clocks) <= 2048


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_make_no_sense_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weights"):
        FairShare({"a": weight})


@_QUICK
@given(st.lists(st.tuples(st.sampled_from("art"), st.integers(0, 5), st.integers(1, 4)), max_size=60))
def test_the_queue_is_a_stable_sort_whatever_enters_and_leaves(moves: list[tuple[str, int, int]]) -> None:
    queue, model = SortedItems(), list[Item]()
    for move, key, number in moves:
        if move == "a":
            items = [Item(0.0, number) for _ in range(number)]
            for step, item in enumerate(items):
                item.key = float(key - step)
            queue.add(items)
            model += items
        elif move == "r" and model:
            gone = model.pop(key % len(model))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif model:
            batch = queue.items[key % len(queue) :: 1 + number % 2][:number]
            queue.take(batch)
            model = [item for item in model if item not in batch]
        assert queue.items == sorted(model, key=lambda item: item.key)
        assert queue.total_length == sum(item.length for item in model)
        for count in range(len(model) + 1):
            assert queue.length_of_first(count) == sum(item.length for item in queue.items[:count])
        if model:
            assert [queue.rank(item) for item in queue.items] == list(range(len(queue)))


@pytest.mark.parametrize("policy", [auto(16, order=FairShare()), length_aware(None, 16, order=FairShare())])
def test_tenants_get_their_shares_where_like_lengths_go_together(policy: BatchPolicy) -> None:
    waiting = Backlog(policy)
    for cells, count in ((20, 1), (300, 1), (4800, 16), (320, 16)):
        waiting.observe(cells, cells, count, 0.01 + cells * 2e-5)
    for _ in range(1000):
        waiting.add((Item(0.0, 20, tenant="many short"),))
    for _ in range(100):
        waiting.add((Item(0.0, 300, tenant="few long"),))
    served: Counter[Hashable] = Counter()
    now = 0.0
    while served.total() < 20_000:
        decision = waiting.decide(now)
        assert isinstance(decision, Dispatch)
        for item in decision.items:
            served[item.tenant] += item.length
        now += 0.01 + 2e-5 * len(decision.items) * max(item.length for item in decision.items)
    assert 0.4 < served["few long"] / served.total() < 0.6


def test_an_item_may_have_a_weight_of_its_own() -> None:
    order = FairShare({"a": 2.0}, weight_of=lambda item: 2.0 ** (5 - item.priority))
    items = [Item(0.0, 8, tenant="a", priority=6) for _ in range(4)] + [Item(0.0, 8, tenant="b") for _ in range(4)]
    assert Counter(item.tenant for item in _served(order, items)[:4]) == {"a": 2, "b": 2}


@_QUICK
@given(
    backlog=st.integers(1, 300),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    own=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    base=st.floats(0.0, 0.01),
)
def test_a_batch_is_not_much_longer_for_a_tenant_of_little_than_it_would_be_alone(
    backlog: int, lengths: list[int], own: list[int], base: float
) -> None:
    by_token = 1e-4
    policy = Backlog(Policy(EvenBatches(Goodput(64, 4096)), order=FairShare()))
    for cells in (10, 1000, 4000, 50, 2000, 300):
        policy.observe(cells, cells, 4, base + by_token * cells)
    for number in range(backlog):
        policy.add((Item(0.0, lengths[number % len(lengths)], tenant="much"),))
    assert isinstance(policy.decide(0.0), Dispatch)
    mine = [Item(1.0, length, tenant="little") for length in own]
    for item in mine:
        policy.add((item,))
    left = set(mine)
    while left:
        decision = policy.decide(1.0)
        assert isinstance(decision, Dispatch)
        tokens = Counter[Hashable]()
        for item in decision.items:
            tokens[item.tenant] += item.length
        if tokens["little"] and decision.items[0].tenant == "little":
            assert tokens["much"] <= max(tokens["little"], 1.2 * base / by_token + 1)
        left -= set(decision.items)


def test_tenants_of_one_item_each_share_a_batch() -> None:
    policy = Backlog(Policy(EvenBatches(Goodput(64, 4096)), order=FairShare()))
    policy.observe(10, 10, 1, 0.001)
    for number in range(64):
        policy.add((Item(0.0, 10, tenant=number),))
    decision = policy.decide(0.0)
    assert isinstance(decision, Dispatch)
    assert len(decision.items) == 64
