"""What it costs to find out that a model is down."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from batchwright.policies.breaker import Breaker
from batchwright.policies.search import Search

MOST_IN_VAIN = 68
"""Calls beyond 1.2 for each batch that it takes at most to find out that a model is down."""


def calls_in_vain(sizes: Iterable[int]) -> float:
    """The most calls, beyond 1.2 for each batch, of a model that is down and gets batches of these sizes.

    Each batch is searched to its end before the next one comes.
    """
    breaker, error, calls, most = Breaker(), ConnectionError("down"), 0, 0.0

    def fail(search: Search[int], part: list[int]) -> None:
        nonlocal calls
        calls += 1
        breaker.failed(len(part), error, 0.0, was_suspected=search.was_suspected)
        if len(part) > 1:
            search.error = search.error or error
        search.failed()

    for number, size in enumerate(sizes, 1):
        search = Search(range(size))
        while part := (search.single if breaker.is_doubtful else search.part)(lambda _: True):
            fail(search, part)
            if breaker.is_open:
                break  # the others of the batch fail with the one that was tried
        most = max(most, calls - 1.2 * number)
    return most


def test_few_calls_show_that_a_model_is_down_whatever_the_sizes_of_batches() -> None:
    assert max(calls_in_vain([first, second]) for first in range(1, 41) for second in range(1, 41)) <= MOST_IN_VAIN


@pytest.mark.parametrize("more", [(1,), (2, 2), (3, 1, 1), (7,), (8, 8), (28,)])
def test_further_batches_do_not_make_it_more(more: tuple[int, ...]) -> None:
    for first in range(1, 41):
        for second in (1, 2, 4, 7, 8, 14, 16, 28):
            assert calls_in_vain([first, second, *more]) <= MOST_IN_VAIN


def test_an_open_breaker_tries_one_request_of_each_batch() -> None:
    few, many = calls_in_vain([64] * 3), calls_in_vain([64] * 300)
    assert many == few
