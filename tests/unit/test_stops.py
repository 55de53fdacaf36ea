"""Stop strings: what is passed on is the text before the stop that is complete first, however the text is cut."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.stop_strings import StopAutomaton, StopStrings

ALPHABETS = ["a", "ab", "abc", "e\u0301\u0308", "\U0001f469\u200d\ud83d\udc69\0"]
"""Of few characters each, so that stops overlap: letters, combining marks, halves of surrogate pairs."""

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@st.composite
def texts_and_stops(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Many stops over few characters, nested, overlapping, and with a common beginning."""
    alphabet = draw(st.sampled_from(ALPHABETS))
    beginning = draw(st.text(alphabet, max_size=6))
    ends = draw(st.lists(st.text(alphabet, max_size=5), min_size=1, max_size=25))
    own = draw(st.lists(st.text(alphabet, min_size=1, max_size=8), max_size=10))
    pieces = st.sampled_from([*own, beginning or alphabet, *alphabet])
    text = "".join(draw(st.lists(pieces, max_size=30)))
    return text, own + [stop for end in ends if (stop := beginning + end)]


def before_stop(text: str, stops: list[str], armed_from: int = 0) -> tuple[str, bool]:
    """The plain meaning: of all places where a stop ends after `armed_from`, the first; the longest that ends there."""
    ends = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > armed_from
    ]
    return (text[: min(ends)[1]], True) if ends else (text, False)


def feed(stop_strings: StopStrings, pieces: list[str], unarmed: int = 0) -> tuple[list[str], bool]:
    passed = []
    for index, piece in enumerate(pieces):
        text, stopped = stop_strings.push(piece, armed=index >= unarmed)
        passed.append(text)
        if stopped:
            return passed, True
    return [*passed, stop_strings.flush()], False


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(letters, stops, st.lists(st.integers(0, 30), max_size=12))
def test_any_cutting_gives_the_same(text: str, stops: list[str], places: list[int]) -> None:
    passed, stopped = feed(StopStrings(stops), cut(text, places))
    assert ("".join(passed), stopped) == before_stop(text, stops)


@given(letters, st.text("ab", min_size=1, max_size=5), st.lists(st.integers(0, 30), max_size=12))
def test_one_stop_is_str_find(text: str, stop: str, places: list[int]) -> None:
    passed, stopped = feed(StopStrings([stop]), cut(text, places))
    at = text.find(stop)
    assert stopped == (at >= 0)
    assert "".join(passed) == (text if at < 0 else text[:at])


@given(letters, stops, st.lists(st.integers(0, 30), max_size=12), st.integers(0, 5))
def test_what_ends_before_it_is_armed_does_not_stop(
    text: str, stops: list[str], places: list[int], unarmed: int
) -> None:
    pieces = cut(text, places)
    passed, stopped = feed(StopStrings(stops), pieces, unarmed)
    assert ("".join(passed), stopped) == before_stop(text, stops, len("".join(pieces[:unarmed])))


@given(letters, st.lists(st.integers(0, 30), max_size=12))
def test_without_stops_text_passes_at_once(text: str, places: list[int]) -> None:
    pieces = cut(text, places)
    assert feed(StopStrings([]), pieces) == ([*pieces, ""], False)


def test_no_more_is_held_than_may_become_a_stop() -> None:
    stop_strings = StopStrings(["<end>"])
    assert stop_strings.push("a <e") == ("a ", False)
    assert stop_strings.push("m") == ("<em", False)
    assert stop_strings.push("<en") == ("", False)
    assert stop_strings.push("d> more") == ("", True)


@settings(max_examples=examples(150, long=400))
@given(texts_and_stops(), st.lists(st.integers(0, 60), max_size=12), st.integers(0, 5))
def test_many_stops_are_the_plain_meaning(
    text_and_stops: tuple[str, list[str]], places: list[int], unarmed: int
) -> None:
    text, many = text_and_stops
    pieces = cut(text, places)
    passed, stopped = feed(StopStrings(many), pieces, unarmed)
    assert ("".join(passed), stopped) == before_stop(text, many, len("".join(pieces[:unarmed])))


@settings(max_examples=examples(150, long=400))
@given(texts_and_stops(), st.lists(st.integers(0, 60), max_size=12))
def test_held_back_is_just_what_may_become_a_stop(text_and_stops: tuple[str, list[str]], places: list[int]) -> None:
    text, many = text_and_stops
    stop_strings = StopStrings(many)
    read = passed = ""
    for piece in cut(text, places):
        read += piece
        passed += stop_strings.push(piece, armed=False)[0]
        beginnings = {stop[:length] for stop in many for length in range(len(stop))}
        held = next(read[at:] for at in range(len(read) + 1) if read[at:] in beginnings or at == len(read))
        assert passed + held == read
    assert passed + stop_strings.flush() == text


class Counting(list[int]):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["".join(word) + "." for word in product("abcdefghij", repeat=4)], "abcdefghji" * 500),
        (["a" * 255 + "b"], "a" * 5000),
        (["a" * (255 - i) + "b" + "c" * i for i in range(16)], ("a" * 254 + "d") * 20),
    ],
    ids=["ten thousand", "one", "sixteen with a common beginning"],
)
def test_a_character_costs_a_step_forward_and_one_back_whatever_the_stops(
    stops: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    automaton = StopAutomaton(stops)
    retreats = Counting(automaton._retreats)
    monkeypatch.setattr(automaton, "_retreats", retreats)
    automaton.read(0, text, armed=False)
    assert 0 < retreats.reads <= len(text)


def test_texts_with_the_same_stops_share_tables_for_as_long_as_there_are_any() -> None:
    stops = ["<one>", "<two>"]
    first, second = StopStrings(stops), StopStrings(list(stops))
    assert first._automaton is second._automaton
    tables = weakref.ref(first._automaton)
    del first, second
    gc.collect()
    assert tables() is None


def test_tables_are_small() -> None:
    """A node for each character at most; clients choose the strings."""
    automaton = StopAutomaton(["a" * 255 + "b", "a" * 255 + "c", "d" * 10])
    assert len(automaton.depths) - 1 == 1 + 256 + 1 + 10
