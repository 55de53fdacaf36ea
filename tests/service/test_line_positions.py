"""The order in which the lines of a batch are claimed: lines with common prefixes follow one another."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.support import ENDPOINT, TENANT, House, Model, in_house, line

from batchwright.service.worker.line_positions import LinePositions
from batchwright.store.records import NewLine

_WORDS = ["".join(random.Random(number).choices("abcdefghij ", k=400)) for number in range(4)]
"""Prefixes of prompts, of several blocks each."""


def positioned(bodies: list[dict[str, Any]], endpoint: str = ENDPOINT, **bounds: int) -> list[NewLine]:
    """The lines with these bodies, by number."""
    positions, found = LinePositions(8, **bounds), []
    for number, body in enumerate(bodies, start=1):
        positions.add(NewLine(number, f"c{number}", 10 * number, 9), endpoint, body)
        if positions.full:
            found += positions.window(more=True)
    return found + positions.window(more=False)


def claimed(lines: list[NewLine]) -> list[int]:
    """Numbers in the order in which the store hands them out."""
    return [each.number for each in sorted(lines, key=lambda each: (each.position, each.number))]


def changes(values: list[Any]) -> int:
    return sum(one != other for one, other in pairwise(values))


def test_lines_with_a_common_prefix_follow_one_another() -> None:
    bodies = [{"prompt": f"{_WORDS[number % 4]} question {number}"} for number in range(200)]
    order = claimed(positioned(bodies))
    assert sorted(order) == [*range(1, 201)]
    assert changes([(number - 1) % 4 for number in order]) == 3


def test_the_share_of_text_that_lines_before_begin_with_is_known() -> None:
    positions = LinePositions(8)
    assert positions.shared is None
    for number in range(8):
        # Five blocks each, of which the first four are in common.
        prompt = {"prompt": "x" * 600 + f"{number}" * 60}
        positions.add(NewLine(number + 1, f"c{number}", 0, 9), ENDPOINT, prompt)
    positions.window(more=False)
    assert positions.shared == pytest.approx(7 * 512 / (8 * 662))


def test_a_longer_common_prefix_is_kept_together_too() -> None:
    bodies = [
        {
            "messages": [
                {"content": _WORDS[0], "role": "system"},
                {"content": _WORDS[1 + n % 3] + f" {n}", "role": "user"},
            ]
        }
        for n in range(60)
    ]
    order = claimed(positioned(bodies, "/v1/chat/completions"))
    assert changes([(number - 1) % 3 for number in order]) <= 5


def test_a_line_of_a_better_priority_comes_first() -> None:
    bodies: list[dict[str, Any]] = [{"prompt": f"{_WORDS[n % 2]} {n}"} for n in range(20)]
    bodies[13]["priority"], bodies[5]["priority"] = 1, 9
    order = claimed(positioned(bodies))
    assert order[0] == 14
    assert order[-1] == 6


def test_the_longest_of_those_whose_length_is_told_do_not_come_last() -> None:
    bodies = [{"prompt": f"{n}", "expected_tokens": 10 + n, "max_tokens": 1000} for n in range(100)]
    last = claimed(positioned(bodies))[-8:]
    assert max(last) < 50
    assert last == sorted(last, reverse=True)


_bodies = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.builds("{}{}".format, st.sampled_from([*_WORDS, ""]), st.sampled_from("abc"))},
        optional={
            "max_tokens": st.sampled_from([1, 5, 700, "x"]),
            "expected_tokens": st.integers(0, 9),
            "priority": st.sampled_from([-1, 5, 9, "high"]),
            "prompt_cache_key": st.sampled_from(["k", "l"]),
        },
    ),
    max_size=60,
)


@given(_bodies, st.integers(1, 70), st.sampled_from([ENDPOINT, "/v1/embeddings", "/v1/responses"]))
def test_each_line_has_a_position_of_its_own_and_windows_follow_one_another(
    bodies: list[dict[str, Any]], window: int, endpoint: str
) -> None:
    lines = positioned(bodies, endpoint, most_lines=window)
    assert [each.number for each in lines] == [*range(1, len(bodies) + 1)]
    assert sorted(each.position for each in lines) == [*range(len(bodies))]
    assert all((each.number - 1) // window == each.position // window for each in lines)
    first: dict[str, int] = {}
    for each, body in zip(lines, bodies, strict=True):
        # Of lines that ask the same, an earlier one comes earlier: it is the one that is asked.
        key = repr(sorted(body.items()))
        assert first.get(key, -1) < each.position
        first[key] = each.position


def test_many_blocks_fill_a_window() -> None:
    lines = positioned([{"prompt": "x" * 1280 + str(n)} for n in range(10)], most_blocks=20)
    assert [each.position // 2 for each in lines] == [n // 2 for n in range(10)]


@pytest.mark.parametrize("wrong", [{"places": 0}, {"places": 1, "most_lines": 0}, {"places": 1, "most_blocks": 0}])
def test_bounds_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LinePositions(**wrong)


@in_house
async def test_a_worker_computes_lines_by_position(house: House) -> None:
    model, started = Model(slots=1), list[str]()

    def note(prompt: str) -> None:
        started.append(prompt)

    model.faults = note
    prompts = [f"{_WORDS[number % 4]}{number}" for number in range(40)]
    file_id = await house.upload(*(line(prompt, str(number)) for number, prompt in enumerate(prompts)))
    batch = await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint=ENDPOINT)
    async with house.worker(model):
        await house.ended(batch)
    assert sorted(started) == sorted(prompts)
    assert changes([prompt[:400] for prompt in started]) <= 7
    batch = await house.batch(batch)
    assert batch.shared == pytest.approx(36 * 384 / sum(len(prompt) + 2 for prompt in prompts))
    output = await house.content(batch.output_file_id)
    assert {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in output} == {
        str(number): prompt.upper() for number, prompt in enumerate(prompts)
    }
