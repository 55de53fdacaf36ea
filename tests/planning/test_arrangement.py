"""How late lines may come, in the order that `arranged` finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchwright.planning.arrangement import Arrangement, LineShape, arranged
from batchwright.planning.expected_lengths import ExpectedLengths

PLACES = 4


def told(answer: int, blocks: Sequence[int] = ()) -> LineShape:
    """A line that tells the length of its answer."""
    return LineShape(10, 1000, np.array(blocks, np.int64), answer)


def order(lines: list[LineShape], *, cached: list[int] | None = None, more: bool = False) -> Arrangement:
    path = None if cached is None else np.array(cached, np.int64)
    return arranged(lines, ExpectedLengths(), places=PLACES, cached=path, more=more)


def late(lines: list[LineShape], numbers: list[int]) -> list[int]:
    """Those of `numbers`, which come in this order, that begin too late to end with the job."""
    answers = [each.expected or 0 for each in lines]
    begun, found = 0, []
    for number in numbers:
        if begun > sum(answers) - PLACES * answers[number]:
            found.append(number)
        begun += answers[number]
    return found


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_no_line_is_late_if_none_is_with_the_longest_first(answers: list[int]) -> None:
    lines = [told(each) for each in answers]
    first = order(lines).first.tolist()
    if not late(lines, sorted(first, key=lambda number: -answers[number])):
        assert not late(lines, first)


def test_no_line_of_a_prefix_is_late() -> None:
    prefixes = [told(200 if line == 19 else 50, [task, line]) for task in (1, 2) for line in range(20)]
    lines = [*prefixes, *(told(50) for _ in range(20))]
    found = order(lines)
    assert not late(lines, found.first.tolist())


def test_of_those_that_are_late_anyway_the_longest_come_first() -> None:
    lines = [told(100), told(300), told(200)]
    found = order(lines)
    assert [*found.first.tolist(), *found.last.tolist()] == [1, 2, 0]


def test_while_more_lines_come_long_answers_are_spread_evenly() -> None:
    lines = [told(500 if number % 10 == 9 else 50) for number in range(40)]
    found = order(lines, more=True)
    places = [place for place, number in enumerate(found.first.tolist()) if number % 10 == 9]
    assert max(later - place for place, later in pairwise(places)) <= 10
    assert places[-1] >= 25
    assert max(place for place, number in enumerate(order(lines).first.tolist()) if number % 10 == 9) < 20


def test_what_is_cached_comes_first_whatever_is_due() -> None:
    prefixes = [told(20, [task, line]) for task in (1, 2) for line in range(10)]
    found = order([*prefixes, told(100)], cached=[2, 99])
    assert found.first.tolist()[:10] == [*range(10, 20)]
