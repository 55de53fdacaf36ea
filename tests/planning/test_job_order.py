"""`JobOrder` as a job uses it: lines are added while there is room, and taken and answered in turn."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.planning.arrangement import Caches, LineShape
from batchwright.planning.job_order import JobOrder


def shape(prompt: list[int], *, tokens: int = 10, limit: int = 100, expected: int | None = None) -> LineShape:
    return LineShape(tokens, limit, np.array(prompt, np.int64), expected)


def order_of(
    shapes: list[LineShape], *, places: int = 2, answers: list[int] | None = None, **options: Any
) -> list[int]:
    """The numbers of the lines in the order in which they are taken; each is answered when `places` later ones are."""
    order = JobOrder[int](places, **options)
    left, taken = list(enumerate(shapes))[::-1], list[int]()
    while left or len(order):
        for _ in range(2):
            if left and not order.full:
                number, each = left.pop()
                order.add(number, number, size=1, shape=each)
        item = order.take(more=bool(left))
        if item is not None:
            taken.append(item)
            if answers is not None and len(taken) > places:
                order.ended(taken[-places - 1], answers[taken[-places - 1]])
        else:
            assert left, "lines are held, and none is given"
            assert not order.full, "it waits for lines that it does not take"
    return taken


lines = st.lists(
    st.builds(
        shape,
        st.lists(st.integers(0, 2), max_size=4),
        tokens=st.integers(1, 60),
        limit=st.sampled_from([1, 10, 200]),
        expected=st.none() | st.integers(0, 300),
    ),
    max_size=40,
)


@settings(max_examples=examples(25, long=60))
@given(lines, st.integers(1, 8), st.integers(1, 12), st.integers(1, 30), st.data())
def test_every_line_is_taken_once_whatever_is_held(
    shapes: list[LineShape], places: int, most_lines: int, most_bytes: int, data: st.DataObject
) -> None:
    answers = data.draw(st.lists(st.integers(0, 300), min_size=len(shapes), max_size=len(shapes)))
    taken = order_of(shapes, places=places, answers=answers, most_lines=most_lines, most_bytes=most_bytes)
    assert sorted(taken) == list(range(len(shapes)))


def test_lines_with_a_prefix_follow_one_another() -> None:
    prompts = [[each % 3, 7, each % 2] for each in range(12)]
    taken = order_of([shape(each) for each in prompts])
    for place, number in enumerate(taken[1:], start=1):
        begun = {tuple(prompts[each]) for each in taken[:place]}
        if tuple(prompts[number]) not in begun:
            # A path is begun only when all lines with the one before it have been.
            path = tuple(prompts[taken[place - 1]])
            assert all(tuple(each) != path or index in taken[:place] for index, each in enumerate(prompts))


def test_a_prefix_that_is_cached_goes_on_when_more_lines_come() -> None:
    first = [shape([5, each]) for each in range(8)]
    taken = order_of([*first, shape([1, 1]), shape([1, 2]), *first], most_lines=8)
    at = [place for place, number in enumerate(taken) if number not in (8, 9)]
    assert at == list(range(16))


def test_the_surest_to_be_short_are_kept_for_the_end() -> None:
    """Lines of 500 prompt tokens have answers of 5 tokens, those of 20 of 5 or of 90: nobody says so beforehand."""
    sizes = [500 if number % 2 else 20 for number in range(1000)]
    answers = [5 if size == 500 or number % 20 else 90 for number, size in enumerate(sizes)]
    shapes = [shape([], tokens=size) for size in sizes]
    taken = order_of(shapes, answers=answers, places=4)
    assert {sizes[number] for number in taken[-20:]} == {500}
    # Most of the job has both, as the input does.
    for start in range(0, 800, 100):
        assert 30 <= sum(sizes[number] == 500 for number in taken[start : start + 100]) <= 70


def test_prefixes_that_caches_hold_anyway_need_not_be_together() -> None:
    shapes = [shape([each % 3, 7], tokens=32) for each in range(60)]
    assert order_of(shapes, caches=Caches(1, 1000, 16)) == list(range(60))
    assert order_of(shapes, caches=Caches(1, 10, 16)) != list(range(60))


def test_each_cache_goes_through_prefixes_of_its_own() -> None:
    shapes = [shape([each % 4, 7], tokens=32) for each in range(80)]
    taken = order_of(shapes, places=40, caches=Caches(2, 10, 16))
    for start in range(0, 80, 20):
        assert len({number % 4 for number in taken[start : start + 20]}) in (2, 3), "two side by side"


def test_what_a_line_says_of_its_answer_is_believed() -> None:
    shapes = [shape([], expected=90 if number % 10 else 2) for number in range(100)]
    taken = order_of(shapes, places=2)
    assert all(number % 10 == 0 for number in taken[-5:])
    assert any(number % 10 for number in taken[:5])


def test_lines_of_one_kind_keep_their_order() -> None:
    assert order_of([shape([]) for _ in range(50)]) == list(range(50))


def test_urgent_lines_go_first_and_late_ones_last() -> None:
    order = JobOrder[str](2)
    for number, (name, priority) in enumerate({"late": 3, "a": None, "now": 0, "sooner": -2, "b": None}.items()):
        order.add(number, name, size=1, shape=shape([]), priority=priority)
    assert order.take(more=True) is None, "others may be more urgent"
    assert [order.take(more=False) for _ in range(6)] == ["sooner", "now", "a", "b", "late", None]


def test_urgent_lines_wait_for_others_only_at_the_beginning() -> None:
    order, asked = JobOrder[int](4), 0
    taken: list[int] = []
    while len(taken) < 4:
        order.add(asked, asked, size=1, shape=shape([]), priority=0)
        asked += 1
        if (line := order.take(more=True)) is not None:
            taken.append(line)
    assert taken == [0, 1, 2, 3]
    assert asked == 16 + 4, "four for each place, then each of the others at once"


def test_what_is_expected_of_a_line_is_that_of_its_cluster() -> None:
    order = JobOrder[int](2)
    for number in range(40):
        order.add(number, number, size=1, shape=shape([number % 2, number], tokens=10 + 40 * (number % 2)))
    taken = [order.take(more=False) for _ in range(40)]
    assert order.expected(taken[0] or 0, 100) is None, "nothing was learned"
    for number in range(2, 40):
        order.ended(number, 5 if number % 2 else 60)
    short, long = order.expected(1, 100), order.expected(0, 100)
    assert short is not None
    assert long is not None
    assert short < 20.0 < 50.0 < long
    assert order.expected(39, 100) is None, "it has ended"


def _tasks(lines: int, tasks: int) -> list[LineShape]:
    """Lines of tasks in turn, all behind one system prompt."""
    return [shape([9, 9, 100 + each % tasks, 1000 + each], tokens=70) for each in range(lines)]


def test_the_shortest_task_behind_a_common_system_prompt_is_kept_for_the_end() -> None:
    """All prompts are equally long, and nothing but the template of each says how long its answer will be."""
    answers = [4 if number % 5 == 3 else 40 + number % 5 for number in range(1000)]
    taken = order_of(_tasks(1000, 5), answers=answers, places=8)
    assert {number % 5 for number in taken[-20:]} == {3}


def test_lines_of_a_task_follow_one_another_behind_a_common_system_prompt() -> None:
    taken = order_of(_tasks(400, 5), places=4, answers=[10] * 400, caches=Caches(1, 20, 16))
    changes = sum(taken[place] % 5 != taken[place - 1] % 5 for place in range(1, 400))
    assert changes < 40, "of a task's prefix, little more is computed than once for each window"


def test_the_last_lines_of_a_task_are_still_expected_to_be_like_the_others() -> None:
    """When few of a task are left, the tree of those that are held does not show its template any more."""
    order = JobOrder[int](2)
    for number, each in enumerate(_tasks(130, 2)):
        order.add(number, number, size=1, shape=each)
    for _ in range(128):
        item = order.take(more=False)
        assert item is not None
        order.ended(item, 5 if item % 2 else 80)
    # The order is decided anew after 64 answers, and after 128.
    last = order.take(more=False)
    assert last is not None
    expected = order.expected(last, 100)
    assert expected is not None
    assert expected < 10.0 if last % 2 else expected > 70.0
