"""Figures by priority stay few, whatever priorities clients send."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.histograms import Histogram
from batchwright.priority_levels import MOST_LEVELS, OTHERS, PriorityLevels

_QUICK = settings(max_examples=100)


@_QUICK
@given(st.lists(st.integers(-30, 30), max_size=100))
def test_levels_are_at_most_ten_and_lose_nothing(priorities: list[int]) -> None:
    levels = PriorityLevels()
    for priority in priorities:
        levels.at(priority).succeeded += 1
    assert len(levels) <= MOST_LEVELS == 10
    assert sum(level.succeeded for level in levels.values()) == len(priorities)
    own = list(dict.fromkeys(priorities))[: MOST_LEVELS - 1]
    assert {name: level.succeeded for name, level in levels.items() if name != OTHERS} == {
        priority: priorities.count(priority) for priority in own
    }
    names = [name for name, _ in levels.ordered()]
    assert names == [*sorted(own), *([OTHERS] if OTHERS in levels else [])]


def test_the_share_in_time_is_of_those_with_a_deadline() -> None:
    level = PriorityLevels().at(5)
    assert level.in_time_share is None
    level.succeeded, level.in_time, level.late, level.refused = 10, 3, 1, 7
    assert level.in_time_share == 0.75


@_QUICK
@given(st.lists(st.lists(st.floats(0.0, 1e6)), max_size=4))
def test_a_merged_histogram_is_that_of_all_values(parts: list[list[float]]) -> None:
    def filled(values: list[float]) -> Histogram:
        histogram = Histogram()
        for value in values:
            histogram.add(value)
        return histogram

    merged, whole = Histogram.merged(map(filled, parts)), filled([value for part in parts for value in part])
    assert (merged.count, merged.maximum) == (whole.count, whole.maximum)
    assert [merged.percentile(q) for q in (0, 50, 99, 100)] == [whole.percentile(q) for q in (0, 50, 99, 100)]
    assert abs(merged.total - whole.total) <= 1e-9 * whole.total
