"""Finding who is to blame: everybody is settled, the innocent with an answer, in few tries."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from batchwright.policies.search import Search


def _run(size: int, bad: set[int], gone: dict[int, set[int]]) -> tuple[Counter[int], set[int], set[int], int]:
    """How often each was tried, who was answered, who was found to blame, and in how many tries."""
    search = Search(range(size), RuntimeError())
    tried: Counter[int] = Counter()
    answered: set[int] = set()
    blamed: set[int] = set()
    away: set[int] = set()
    tries = 0

    def wanted(item: int) -> bool:
        return item not in away

    while True:
        away.update(gone.get(tries, set()))
        part = search.part(wanted)
        if not part:
            return tried, answered, blamed, tries
        assert not (set(part) & (answered | blamed | away))
        assert not set(part) & set(search.left())
        tries += 1
        tried.update(part)
        if not bad & set(part):
            answered |= set(part)
            search.succeeded()
            continue
        if len(part) == 1:
            blamed |= set(part)
        search.failed()


@given(
    size=st.integers(2, 40),
    data=st.data(),
)
def test_everybody_is_settled(size: int, data: st.DataObject) -> None:
    members = st.sets(st.integers(0, size - 1))
    bad = data.draw(members)
    gone = data.draw(st.dictionaries(st.integers(0, 10), members, max_size=3))
    tried, answered, blamed, tries = _run(size, bad, gone)
    away = set().union(*gone.values()) if gone else set()
    assert not answered & bad
    assert blamed <= bad
    assert answered | blamed | away == set(range(size))
    assert max(tried.values(), default=0) <= 1 + math.ceil(math.log2(size))
    assert tries <= 2 * size


@given(size=st.integers(2, 64), data=st.data())
def test_one_bad_request_is_found_in_few_tries(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, size - 1))
    _, answered, blamed, tries = _run(size, {bad}, {})
    assert blamed == {bad}
    assert len(answered) == size - 1
    assert tries <= 2 * math.ceil(math.log2(size)) + 1


def test_a_failure_that_does_not_come_back_blames_nobody() -> None:
    _, answered, blamed, _ = _run(8, set(), {})
    assert (answered, blamed) == (set(range(8)), set())
