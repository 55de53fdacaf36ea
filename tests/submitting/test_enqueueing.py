"""How the limit of enqueued tokens is found."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.submitting.enqueueing import EnqueuedTokens, is_enqueued_limit, named_limit


@given(st.integers(10, 400), st.integers(1, 10), st.booleans(), st.integers(20, 120))
def test_a_hidden_limit_is_found_and_used(hidden: int, size: int, told: bool, batches: int) -> None:
    """Batches of a few tokens at a provider with a limit: all get through, with few refusals, and it is kept full."""
    limit, refusals, done = EnqueuedTokens(), 0, 0
    enqueued: list[float] = []
    least_free: list[float] = []
    for now in range(10_000):
        tokens = min(size, limit.most_of_one(now))
        while done + len(enqueued) < batches and limit.has_room(tokens, sum(enqueued), now):
            if sum(enqueued) + tokens > hidden:
                limit.refuse(tokens, sum(enqueued), now, hidden if told else None)
                refusals += 1
                break
            enqueued.append(tokens)
            limit.took(sum(enqueued), now)
        if done + len(enqueued) < batches:
            least_free.append(hidden - sum(enqueued))
        if enqueued:
            enqueued.pop(0)
            done += 1
            limit.ended()
        if done == batches:
            break
    assert done == batches
    # At most one for each batch that ended, and once the limit is found, none.
    assert refusals <= 2 + math.log2(hidden + 2)
    if least_free and hidden >= 10 * size:
        assert min(least_free) <= hidden * 0.2


def test_one_batch_that_is_too_large_is_made_smaller() -> None:
    limit = EnqueuedTokens()
    assert limit.has_room(1000, 0, 0.0)
    limit.refuse(1000, 0, 0.0)
    assert limit.most_of_one(0.0) == 500
    limit.refuse(500, 0, 0.0)
    assert limit.most_of_one(0.0) == 250
    limit.refuse(250, 0, 0.0, named=200)
    assert limit.most_of_one(0.0) == pytest.approx(180)
    assert limit.most_of_one(3600.0) == math.inf


def test_a_batch_that_fits_by_itself_waits_for_those_of_others() -> None:
    limit = EnqueuedTokens()
    limit.refuse(100, 0, 0.0, named=5000)
    assert limit.most_of_one(0.0) == 100
    limit.closed_until = 300.0
    assert not limit.has_room(100, 0, 299.0)
    assert limit.has_room(100, 0, 300.0)


@pytest.mark.parametrize(
    ("message", "tokens"),
    [
        ("Enqueued token limit reached for gpt-4o in organization org-1. Limit: 90,000 enqueued tokens. Try", 90_000),
        ("The number of enqueued tokens has surpassed the configured limit of 30K for the deployment 'x'.", 30_000),
        ("the configured limit of 1.5M tokens", 1_500_000),
        ("Too many enqueued tokens: the limit is reached.", None),
        ("limit: ,,", None),
    ],
)
def test_limits_that_are_told(message: str, tokens: int | None) -> None:
    assert named_limit(message) == tokens


def test_what_is_a_full_queue() -> None:
    assert is_enqueued_limit("token_limit_exceeded", None)
    assert is_enqueued_limit(None, "Enqueued request limit reached for m. Limit: 1,000,000 enqueued requests.")
    assert not is_enqueued_limit("rate_limit_exceeded", "Rate limit reached: 3 requests a minute")
    assert not is_enqueued_limit(None, None)
