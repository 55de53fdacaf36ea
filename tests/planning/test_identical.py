"""Identical requests: found exactly, asked once, and never held up by each other's errors."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.planning.identical import Place, RepeatFinder, Repeats, Sharing


def found(keys: dict[int, bytes]) -> Repeats:
    finder = RepeatFinder()
    for number, key in keys.items():
        finder.add(number, key)
    return finder.repeats()


def as_sets(repeats: Repeats, numbers: list[int]) -> set[frozenset[int]]:
    groups = defaultdict(set)
    for number in numbers:
        if (group := repeats.group_of(number)) is not None:
            groups[group].add(number)
    assert sorted(groups) == [*range(repeats.groups)]
    return {*map(frozenset, groups.values())}


@given(st.lists(st.sampled_from([a + b for a in (b"a" * 8, b"b" * 8, b"\xff" * 8) for b in (b"x" * 8, b"y" * 8)])))
def test_groups_are_those_of_equal_identities(keys: list[bytes]) -> None:
    """Also where only a half of two identities is equal."""
    by_number = {3 * index + 1: key for index, key in enumerate(keys)}
    counts = Counter(keys)
    expected = {
        frozenset(number for number, each in by_number.items() if each == key)
        for key, count in counts.items()
        if count > 1
    }
    repeats = found(by_number)
    assert as_sets(repeats, [*range(3 * len(keys) + 3)]) == expected
    assert len(repeats) == sum(count for count in counts.values() if count > 1)


def test_many_lines() -> None:
    draw = random.Random(1)
    keys = {number: blake2b(str(draw.randrange(5000)).encode(), digest_size=16).digest() for number in range(1, 10_000)}
    expected = defaultdict(set)
    for number, key in keys.items():
        expected[key].add(number)
    assert as_sets(found(keys), [*keys]) == {frozenset(group) for group in expected.values() if len(group) > 1}


class Lines:
    """Lines with these requests, taken up one after the other, and what became of each."""

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys
        self.sharing = Sharing[int](found({number: bytes([key]) * 16 for number, key in enumerate(keys, start=1)}))
        self.unread = [*range(len(keys), 0, -1)]
        self.asked: set[int] = set()
        self.ended: dict[int, str] = {}
        self.asks, self.failures = Counter[int](), Counter[int]()

    def read(self) -> None:
        number = self.unread.pop()
        if (place := self.sharing.answered_at(number)) is not None:
            self.share(number, place.offset)
        elif self.sharing.take_up(number, number, 10):
            self.ask(number)

    def ask(self, number: int) -> None:
        assert number not in self.asked
        assert number not in self.ended
        self.asked.add(number)
        self.asks[self.keys[number - 1]] += 1

    def share(self, number: int, answered: int) -> None:
        assert self.keys[answered - 1] == self.keys[number - 1]
        assert self.ended.setdefault(number, "shared") == "shared"

    def answer(self, number: int) -> None:
        self.asked.remove(number)
        self.ended[number] = "asked"
        for other in self.sharing.answered(number, Place(number, 1)):
            self.share(other, number)

    def fail(self, number: int) -> None:
        self.asked.remove(number)
        self.ended[number] = "failed"
        self.failures[self.keys[number - 1]] += 1
        for other in self.sharing.failed(number):
            self.ask(other)


@settings(max_examples=examples(100, long=300))
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.randoms(use_true_random=False), st.data())
def test_every_line_ends_once_whatever_happens(keys: list[int], draw: random.Random, data: st.DataObject) -> None:
    """Lines are taken up, answered and fail in any order. Requests are asked once unless one failed."""
    lines = Lines(keys)
    while lines.unread or lines.asked:
        if lines.unread and (not lines.asked or data.draw(st.booleans())):
            lines.read()
        else:
            number = draw.choice(sorted(lines.asked))
            (lines.answer if data.draw(st.booleans()) else lines.fail)(number)
        assert lines.sharing.waiting_bytes == 10 * lines.sharing.waiting
    assert lines.sharing.waiting == 0
    assert sorted(lines.ended) == [*range(1, len(keys) + 1)]
    for key, count in Counter(keys).items():
        how = Counter(lines.ended[number] for number, each in enumerate(keys, start=1) if each == key)
        if lines.failures[key] == 0:
            assert lines.asks[key] == 1
            assert how == Counter({"asked": 1, "shared": count - 1})
        elif lines.failures[key] == 1 and count > 1:
            assert lines.asks[key] == 2
        assert how["asked"] or not how["shared"]


def test_after_two_errors_nobody_waits() -> None:
    sharing = Sharing[int](found(dict.fromkeys(range(1, 8), bytes(16))))
    assert [sharing.take_up(number, number, 1) for number in (1, 2, 3, 4)] == [True, False, False, False]
    assert sharing.failed(1) == [2]
    assert sharing.failed(2) == [3, 4]
    assert sharing.take_up(5, 5, 1)
    assert sharing.answered(3, Place(7, 9)) == []
    assert sharing.answered_at(6) == Place(7, 9)
    assert sharing.failed(4) == []
    assert sharing.answered(5, Place(8, 9)) == []
    assert sharing.answered_at(7) == Place(7, 9)


def test_a_line_that_is_given_up_takes_along_those_that_wait_for_it() -> None:
    sharing = Sharing[int](found(dict.fromkeys(range(3, 8), bytes(16))))
    assert sharing.repeats.first_of(0) == 3
    assert sharing.given_up(3) == sharing.given_up(9) == []
    assert [sharing.take_up(number, number, 1) for number in (3, 4, 5)] == [True, False, False]
    assert sharing.all_waiting() == [4, 5]
    assert sharing.given_up(3) == [4, 5]
    assert (sharing.waiting, sharing.waiting_bytes, sharing.all_waiting()) == (0, 0, [])
    # Nothing is known of the request: the next one is asked.
    assert [sharing.take_up(number, number, 1) for number in (5, 3)] == [True, False]
    assert sharing.answered(5, Place(1, 2)) == [3]


def test_answers_of_earlier_runs_are_known() -> None:
    sharing = Sharing[int](found(dict.fromkeys((1, 2), bytes(16))))
    sharing.know(3, Place(1, 1))
    assert sharing.answered_at(1) is sharing.answered_at(3) is None
    sharing.know(2, Place(5, 6))
    assert sharing.answered_at(1) == Place(5, 6)
