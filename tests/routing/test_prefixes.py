"""The prefixes of prompts that replicas are expected to hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.routing.prefixes import KEY_BYTES, KEY_TOKENS, CachedPrefixes, prefix_keys
from batchwright.routing.restarts import Restarts
from batchwright.routing.work import ExpectedAnswers


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_keys_are_equal_as_far_as_prompts_are(common: int, one: int, other: int) -> None:
    prefix = b"a" * KEY_BYTES * common
    first = prefix_keys(b"scope", prefix + b"b" * KEY_BYTES * one)
    second = prefix_keys(b"scope", prefix + b"c" * KEY_BYTES * other + b"rest")
    assert len(first) == common + one
    assert len(second) == common + other
    assert first[:common] == second[:common]
    assert set(first[common:]).isdisjoint(second[common:])
    assert set(first).isdisjoint(prefix_keys(b"another scope", prefix))


chains = st.builds(
    lambda group, length: tuple(group * 100 + i for i in range(length)), st.integers(0, 4), st.integers(0, 9)
)
kinds = st.sampled_from(["note", "promise", "withdraw", "answer", "leave"])
operations = st.lists(st.tuples(kinds, st.integers(0, 2), chains), max_size=60)


@settings(max_examples=examples(100, long=300))
@given(operations)
def test_what_is_found_is_held_or_promised_and_memory_is_bounded(steps: list[tuple[str, int, tuple[int, ...]]]) -> None:
    prefixes, capacity = CachedPrefixes(), 12 * KEY_TOKENS
    promised: list[list[tuple[int, ...]]] = [[], [], []]
    for replica in range(3):
        prefixes.join(replica, capacity)
    for what, replica, keys in steps:
        if what == "note":
            prefixes.note(replica, keys)
            assert prefixes.known_to(replica, keys) == len(keys)
        elif what == "promise":
            prefixes.promise(replica, keys)
            promised[replica].append(keys)
        elif what == "withdraw" and promised[replica]:
            prefixes.withdraw(replica, promised[replica].pop())
        elif what == "answer":
            prefixes.note_answer(replica, 5 * len(keys))
        elif what == "leave":
            prefixes.leave(replica)
            prefixes.join(replica, capacity)
            promised[replica] = []
            assert prefixes.known_to(replica, keys) == 0
        found = prefixes.known(keys)
        assert found == {each: n for each in range(3) if (n := prefixes.known_to(each, keys))}
        assert all(prefixes.known_to(each, chain) == len(chain) for each in range(3) for chain in promised[each])
        assert len(prefixes) <= 3 * capacity
    for replica in range(3):
        for chain in promised[replica]:
            prefixes.withdraw(replica, chain)
        prefixes.leave(replica)
    assert not prefixes._holders


def test_the_ends_of_prompts_are_dropped_before_what_others_share() -> None:
    prefixes = CachedPrefixes()
    prefixes.join(0, 6 * KEY_TOKENS)
    prefixes.note(0, (1, 2, 3, 4))
    prefixes.note(0, (1, 2, 5, 6))
    prefixes.note(0, (7, 8))
    assert prefixes.known_to(0, (1, 2, 3, 4)) == 2
    assert prefixes.known_to(0, (7, 8)) == 2


def test_answers_push_prompts_out() -> None:
    prefixes = CachedPrefixes()
    prefixes.join(0, 4 * KEY_TOKENS)
    prefixes.note(0, (1, 2))
    prefixes.note_answer(0, 3 * KEY_TOKENS)
    assert prefixes.known_to(0, (1, 2)) == 1


def test_answers_are_expected_to_be_as_long_as_they_were() -> None:
    answers = ExpectedAnswers()
    assert answers.of(4096) == 256
    assert answers.of(0) == 0
    for tokens in (10, 20, 30):
        answers.observe(100, tokens)
    assert answers.of(100) == answers.of(120) == 20
    assert answers.of(64) == 20
    assert answers.of(1000) == 256


def test_pauses_before_a_restart_get_longer_until_it_answers() -> None:
    restarts = Restarts()
    pauses = [restarts.died(10.0, luck=1.0) - 10.0 for _ in range(9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    restarts.answered()
    assert restarts.died(0.0, luck=1.0) == 0.5
