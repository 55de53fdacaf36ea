"""What is done quicker for many than for each alone comes to the same."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.policies import (
    Backlog,
    BySize,
    Dispatch,
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
from batchwright.policies.policy import are_alike, sizes

_QUICK = settings(max_examples=examples(60, long=200))


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


_KINDS = st.tuples(
    st.sampled_from([4, 4, 4, 9]), st.sampled_from([5, 5, 5, 2]), st.sampled_from([math.inf, math.inf, math.inf, 60.0])
)


@_QUICK
@given(turns=st.lists(st.lists(_KINDS, max_size=6), max_size=8), size=st.integers(1, 8), known=st.booleans())
def test_what_is_known_to_be_alike_is_alike_and_is_decided_as_if_it_were_not_known(
    turns: list[list[tuple[int, int, float]]], size: int, known: bool
) -> None:
    knowing, looking = Backlog(auto(size)), Backlog(auto(size))
    for backlog in (knowing, looking) if known else ():
        backlog.observe(40, 40, 10, 0.01)
    for now, turn in enumerate(turns):
        for backlog in (knowing, looking):
            backlog.add([Item(float(now), length, priority=level, due=due) for length, level, due in turn])
        items = knowing.items
        assert not are_alike(items) or len({(item.length, item.priority, item.due) for item in items}) <= 1
        assert knowing._waiting.total_length == sum(item.length for item in items)
        looking._waiting.items.alike = False
        decisions = [backlog.decide(float(now)) for backlog in (knowing, looking)]
        told = [
            (each.reason, [item.ordinal for item in each.items], sizes(each.items))
            for each in decisions
            if isinstance(each, Dispatch)
        ]
        assert not told or told[0] == told[1]
