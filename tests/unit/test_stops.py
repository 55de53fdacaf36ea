"""Stop strings: what is passed on is the text before the stop that is complete first, however the text is cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchwright.engine.stops import StopStrings

letters = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


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
