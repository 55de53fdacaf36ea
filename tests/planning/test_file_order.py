"""The order of a whole file, against what windows of it find."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.planning.file_order import FileOrder

_MANY = 2**40
"""Bytes that no window has."""


def order_of(prompts: list[bytes], window: int, most_bytes: int = _MANY, scopes: list[bytes] | None = None) -> object:
    order = FileOrder()
    for scope, prompt in zip(scopes or [b""] * len(prompts), prompts, strict=True):
        order.add(scope, prompt)
    return order.order(window, most_bytes)


def common(left: bytes, right: bytes) -> int:
    """Bytes of the longest prefix in common that is compared."""
    return max(
        (size for size in (256, 1024, 4096, 16384) if left[:size] == right[:size] and len(left) >= size <= len(right)),
        default=0,
    )


def found(prompts: list[bytes], order: list[int]) -> int:
    return sum(common(prompts[before], prompts[after]) for before, after in pairwise(order))


prompts_drawn = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1500)).map(
        lambda drawn: (bytes([drawn[0]]) * 300 + bytes([drawn[1]]) * 1200)[: drawn[2]]
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=examples(80, long=200))
@given(prompts_drawn, st.integers(1, 12))
def test_each_line_comes_once_and_prefixes_come_together(prompts: list[bytes], window: int) -> None:
    order = order_of(prompts, window)
    if order is None:
        windows = [[*range(start, min(start + window, len(prompts)))] for start in range(0, len(prompts), window)]
        best = found(prompts, sorted(range(len(prompts)), key=lambda line: prompts[line]))
        within = sum(found(prompts, sorted(each, key=lambda line: prompts[line])) for each in windows)
        assert len(prompts) <= window or best - within < 0.02 * sum(map(len, prompts)) + 1
        return
    assert isinstance(order, np.ndarray)
    lines = order.tolist()
    assert sorted(lines) == [*range(len(prompts))]
    for size in (256, 1024):
        prefixes = [prompts[line][:size] for line in lines if len(prompts[line]) >= size]
        runs = [each for place, each in enumerate(prefixes) if place == 0 or prefixes[place - 1] != each]
        assert len(runs) == len(set(runs)), "a prefix comes in two places"


def test_lines_that_share_their_prefix_across_windows_are_brought_together() -> None:
    documents = [bytes(random.Random(number).choices(range(256), k=900)) for number in range(50)]
    prompts = [document + f"Question {question}".encode() for question in range(4) for document in documents]
    order = order_of(prompts, 20)
    assert isinstance(order, np.ndarray)
    assert [line % 50 for line in order.tolist()] == [number for number in range(50) for _ in range(4)]
    assert order.tolist()[:4] == [0, 50, 100, 150]
    assert order_of(prompts, 200) is None
    assert order_of(prompts, 200, most_bytes=20 * 911) is not None
    assert order_of(sorted(prompts), 20) is None


def test_what_shares_nothing_keeps_its_order() -> None:
    draw = random.Random(0)
    unrelated = [draw.randbytes(1100) for _ in range(40_000)]
    assert order_of(unrelated, 8000) is None
    assert order_of([b"system " * 40 + each for each in unrelated], 8000) is None


def test_prefixes_that_are_too_short_are_worth_nothing() -> None:
    order, worth = FileOrder(least_shared=4096), FileOrder()
    for line in range(400):
        for each in (order, worth):
            each.add(b"", b"%03d" % (line % 100) * 500)
    assert worth.order(100, _MANY) is not None
    assert order.order(100, _MANY) is None


def test_other_scopes_share_nothing() -> None:
    prompts = [b"x" * 300] * 40
    scopes = [b"%d" % (number % 20) for number in range(40)]
    order = order_of(prompts, 10, scopes=scopes)
    assert isinstance(order, np.ndarray)
    assert [scopes[line] for line in order.tolist()] == [b"%d" % (place // 2) for place in range(40)]


def test_short_lines_keep_their_places() -> None:
    prompts = [b"short", b"a" * 500, b"b" * 500] * 20
    order = order_of(prompts, 3)
    assert isinstance(order, np.ndarray)
    lines = order.tolist()
    assert lines[:4] == [0, 1, 4, 7]
    assert lines[-19:] == [3 * number for number in range(1, 20)]
