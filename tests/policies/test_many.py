"""What is done quicker for many than for each alone comes to the same."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.policies import (
    Backlog,
    BySize,
    FairShare,
    Fifo,
    Item,
    Order,
    Policy,
    Urgency,
    auto,
    simple,
    within_memory,
)
from batchwright.policies.lengths import _cuts, capacity

_QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None)


@_QUICK
@given(
    lengths=st.lists(st.one_of(st.integers(0, 9), st.integers(1, 2000)), min_size=1, max_size=80),
    size=st.integers(1, 80),
    tokens=st.one_of(st.none(), st.integers(1, 5000)),
    base=st.sampled_from([0.0, 1.3e-3, 0.02, 1e9]),
    by_cell=st.sampled_from([0.0, 2e-5, 5.4e-5, 1.0]),
    by_item=st.sampled_from([0.0, 1e-3]),
)
def test_the_division_is_that_of_the_whole_search(
    lengths: list[int], size: int, tokens: int | None, base: float, by_cell: float, by_item: float
) -> None:
    lengths.sort()
    costs, begins = [0.0], [0]
    for end, longest in enumerate(lengths, 1):
        each = by_cell * longest + by_item
        first = end - capacity(longest, size, tokens)
        tried = [(costs[begin] + each * (end - begin), begin) for begin in range(max(begins[-1], first), end)]
        costs.append(min(tried)[0] + base)
        begins.append(min(tried)[1])
    expected, end = list[tuple[int, int]](), len(lengths)
    while end:
        expected.insert(0, (begins[end], end))
        end = begins[end]
    assert _cuts(lengths, size, tokens, (base, by_cell, by_item)) == expected


def test_who_may_be_refused_is_placed_at_once() -> None:
    for policy in (auto(), simple(), Policy(BySize(1), order=Urgency())):
        assert Backlog(policy).takes_many
    for policy in (Policy(BySize(1), order=FairShare()), within_memory()):
        assert not Backlog(policy).takes_many


@_QUICK
@given(
    asked=st.lists(
        st.tuples(st.floats(0.0, 50.0), st.integers(-3, 3), st.one_of(st.just(math.inf), st.floats(0.0, 99.0)))
    ),
    order=st.sampled_from([Fifo(), Urgency()]),
)
def test_many_take_the_places_that_they_would_take_one_by_one(
    asked: list[tuple[float, int, float]], order: Order
) -> None:
    together, single = Backlog(Policy(BySize(3), order=order)), Backlog(Policy(BySize(3), order=order))
    ours, theirs = ([Item(at, priority=level, due=due) for at, level, due in asked] for _ in range(2))
    half = len(asked) // 2
    together.add(ours[:half])
    together.add(ours[half:])
    for item in theirs:
        single.add((item,))
    assert [ours.index(item) for item in together.items] == [theirs.index(i) for i in single.items]
    assert [(item.key, item.level) for item in ours] == [(item.key, item.level) for item in theirs]
