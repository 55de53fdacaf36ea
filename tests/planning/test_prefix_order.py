"""The order of lines by what their prompts have in common."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.planning.prefix_order import PrefixOrder

LEAST, STEP = 4, 2


def small(**options: float) -> PrefixOrder[int]:
    return PrefixOrder(**{"most_lines": 1000, "least_shared": LEAST, "step": STEP, "alone": 2.0, **options})  # type: ignore[arg-type]


def fill(order: PrefixOrder[int], prompts: Iterable[str], start: int = 1) -> None:
    for number, prompt in enumerate(prompts, start=start):
        order.add(number, number, size=len(prompt), prompt=prompt.encode())


def answered_at_once(order: PrefixOrder[int], *, more: bool = False) -> list[int]:
    """All lines, each of which is answered before the next one is taken."""
    taken = []
    while (number := order.take(0.0, more=more)) is not None:
        taken.append(number)
        order.answered(number)
    return taken


def taken_now(order: PrefixOrder[int], now: float = 0.0, *, more: bool = False) -> list[int]:
    """All lines that can be taken without an answer."""
    taken = []
    while (number := order.take(now, more=more)) is not None:
        taken.append(number)
    return taken


prompts = st.lists(
    st.one_of(
        st.text("ab", max_size=12),
        st.builds(str.__add__, st.sampled_from(["aaaa", "aaaabb", "aaaabbaa", "bbbb"]), st.text("ab", max_size=4)),
    ),
    max_size=40,
)


def shared(one: str, other: str) -> int:
    """Bytes in common as far as they count, computed one by one."""
    common = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(one), len(other)) if common is None else common
    return 0 if common < LEAST else LEAST + (common - LEAST) // STEP * STEP


@settings(max_examples=examples(130, long=400))
@given(prompts)
def test_groups_are_contiguous_at_every_depth_and_else_in_order(texts: list[str]) -> None:
    order = small()
    fill(order, texts)
    taken = answered_at_once(order)
    assert sorted(taken) == [*range(1, len(texts) + 1)]
    assert not order
    depth = LEAST
    while depth <= 16:
        prefixes = [texts[number - 1][:depth] for number in taken]
        runs = [key for key, _ in groupby(prefixes) if len(key) == depth]
        assert len(runs) == len({*runs})
        depth += STEP
    # Lines with as much in common with each other as with all lines between them keep their order.
    groups: dict[str, list[int]] = {}
    for number in taken:
        text = texts[number - 1]
        groups.setdefault(text[:LEAST] if len(text) >= LEAST else f"alone {number}", []).append(number)
    assert [*groups.values()] == sorted(groups.values(), key=min)
    for numbers in groups.values():
        assert numbers[0] == min(numbers)
        pairs = {shared(texts[one - 1], texts[other - 1]) for one in numbers for other in numbers if one < other}
        if len(pairs) == 1:
            assert numbers == sorted(numbers)


@given(prompts, st.integers(1, 10))
def test_lines_move_only_within_their_window(texts: list[str], most: int) -> None:
    order = small(most_lines=most)
    taken: list[int] = []
    for number, text in enumerate(texts, start=1):
        while order.full:
            taken += answered_at_once(order, more=True)
        assert len(order) < most
        order.add(number, number, size=1, prompt=text.encode())
    taken += answered_at_once(order)
    for start in range(0, len(texts), most):
        assert sorted(taken[start : start + most]) == [*range(start + 1, min(start + most, len(texts)) + 1)]


@settings(max_examples=examples(100, long=300))
@given(
    prompts, st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60), st.integers(1, 30)
)
def test_every_line_is_taken_once_whenever_answers_come(
    texts: list[str], most: int, moves: list[tuple[bool, int]], most_bytes: int
) -> None:
    """Lines are added, taken and answered in any order; the bounds hold at all times."""
    order = small(most_lines=most, most_bytes=most_bytes)
    unread, under_way, taken = [*enumerate(texts, start=1)], list[int](), list[int]()
    now = 0.0
    for answers, seconds in moves + [(True, 1)] * (4 * len(texts) + 8):
        now += seconds / 4
        while unread and not order.full:
            number, text = unread.pop(0)
            order.add(number, number, size=len(text), prompt=text.encode())
        assert len(order) <= 2.5 * most
        next_line = order.take(now, more=bool(unread))
        if next_line is not None:
            taken.append(next_line)
            under_way.append(next_line)
        elif answers and under_way:
            order.answered(under_way.pop(0))
    while (last := order.take(now := now + 3.0, more=False)) is not None or order or unread:
        taken += [] if last is None else [last]
        while unread and not order.full:
            number, text = unread.pop(0)
            order.add(number, number, size=len(text), prompt=text.encode())
    assert sorted(taken) == [*range(1, len(texts) + 1)]


def test_the_first_goes_alone_and_others_meanwhile() -> None:
    order = small()
    fill(order, ["aaaa1", "aaaa2", "x", "bbbb1", "bbbb2", "aaaa3", "y"])
    assert taken_now(order) == [1, 3, 4, 7]
    order.answered(4)
    assert taken_now(order) == [5]
    assert taken_now(order, 1.9) == []
    assert taken_now(order, 2.0) == [2, 6]


def test_a_prefix_that_was_cached_is_not_waited_for_again() -> None:
    order = small(most_lines=2)
    fill(order, ["aaaa1", "aaaa2"])
    assert taken_now(order, more=True) == [1]
    order.answered(1)
    assert taken_now(order, more=True) == [2]
    fill(order, ["aaaa3", "aaaa4"], start=3)
    assert taken_now(order, more=True) == [3, 4]


def test_a_later_window_waits_for_the_same_line() -> None:
    order = small(most_lines=4)
    fill(order, ["aaaa1", "aaaa2", "x1", "y1"])
    assert taken_now(order, more=True) == [1, 3, 4]
    fill(order, ["aaaa3", "x2", "aaaa4", "y2"], start=5)
    assert taken_now(order, more=True) == [6, 8]
    order.answered(1)
    assert taken_now(order, more=True) == [2, 5, 7]


def test_a_longer_prefix_is_waited_for_only_while_there_are_other_lines() -> None:
    order = small()
    fill(order, ["aaaabb1", "aaaabb2", "aaaacc1", "aaaacc2", "aaaa"])
    assert taken_now(order) == [1]
    order.answered(1)
    # The others of its own longest group come first, then the first of the next.
    assert [order.take(0.0, more=False) for _ in range(3)] == [2, 3, 5]
    assert order.take(0.0, more=False) == 4


def test_a_better_priority_goes_first_and_scopes_are_apart() -> None:
    order = small()
    for number, (scope, prompt, priority) in enumerate(
        [("a", "aaaa", 5), ("b", "aaaa", 5), ("a", "", 9), ("a", "aaaa", 5), ("", "", 1)], start=1
    ):
        order.add(number, number, size=1, scope=scope.encode(), prompt=prompt.encode(), priority=priority)
    assert answered_at_once(order) == [5, 1, 4, 2, 3]


def test_a_long_chain_of_prefixes() -> None:
    order = small(most_lines=3000)
    fill(order, ["ab" * (2 + number) for number in range(2000)])
    assert answered_at_once(order) == [*range(1, 2001)]
