"""The limiter of online requests: no minute with more than its limit, in one process and in several."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InvalidRequest
from batchwright.limiting.estimates import tokens_of_bytes, tokens_of_request
from batchwright.limiting.quotas import Quotas, of_values
from batchwright.limiting.rates import PERIOD, SLOT, Change, Grant, RateLimiter, Refusal, Subject, oldest_slot, slot_of
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL, RESPONSES_URL, SCORE_URL

_START = 1_700_000_003.0
_STEPS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 40), st.integers(0, 2), st.booleans()), min_size=1, max_size=80
)
"""Seconds since the step before, tokens, process, and whether that process shares what it knows before."""


class Counters:
    """What a store keeps of rates."""

    def __init__(self) -> None:
        self.amounts: Counter[tuple[str, int]] = Counter()
        self._heard: dict[int, float] = {}
        """When each limiter shared last."""

    def share(self, limiter: RateLimiter, now: float) -> None:
        changes, rates = limiter.take_changes(now)
        for rate, slot, amount in changes:
            self.amounts[rate, slot] += amount
        since = slot_of(self._heard.get(id(limiter), 0.0)) - 1
        self._heard[id(limiter)] = now
        found = [
            Change(rate, slot, amount)
            for (rate, slot), amount in self.amounts.items()
            if slot >= oldest_slot(now) and (rate in rates or slot >= since)
        ]
        limiter.learn(found, rates)


def _subject(name: str = "tenant:a", **limits: int) -> Subject:
    return Subject(name, Quotas(**limits))


def _most_in_a_minute(events: Iterable[tuple[float, int]]) -> int:
    """Of amounts by time, the largest sum of any minute."""
    told = list(events)
    return max(
        (sum(amount for at, amount in told if end - PERIOD < at <= end) for end, _ in told),
        default=0,
    )


@given(_STEPS, st.integers(1, 12), st.integers(40, 200))
def test_no_minute_has_more_than_its_limits(
    steps: list[tuple[float, int, int, bool]], requests: int, tokens: int
) -> None:
    limiter = RateLimiter()
    subjects = [_subject(requests_per_minute=requests), _subject("key:k", tokens_per_minute=tokens)]
    let_in = []
    for now, (_, asked, _, _) in zip(accumulate((step[0] for step in steps), initial=_START), steps, strict=False):
        came = limiter.admit(subjects, asked, now)
        if isinstance(came, Grant):
            limiter.leave(came)
            let_in.append((now, asked))
    assert let_in
    assert _most_in_a_minute((at, 1) for at, _ in let_in) <= requests
    assert _most_in_a_minute(let_in) <= tokens


@given(_STEPS, st.integers(40, 200))
def test_processes_overshoot_at_most_by_what_they_had_not_heard_of(
    steps: list[tuple[float, int, int, bool]], tokens: int
) -> None:
    counters, limiters = Counters(), [RateLimiter() for _ in range(3)]
    subjects = [_subject(tokens_per_minute=tokens)]
    let_in: list[tuple[float, int, int]] = []
    heard = [0, 0, 0]
    """How many of those each process has heard of."""
    now = _START
    for elapsed, asked, process, shares in steps:
        now += elapsed
        if shares:
            for _ in range(2):  # all hand over, then all hear of it
                for limiter in limiters:
                    limiter.admit(subjects, 0, now)
                    counters.share(limiter, now)
            heard = [len(let_in)] * 3
        if isinstance(limiters[process].admit(subjects, asked, now), Grant):
            unheard = sum(amount for _, amount, by in let_in[heard[process] :] if by != process)
            let_in.append((now, asked, process))
            assert sum(amount for at, amount, _ in let_in if at > now - PERIOD) <= tokens + unheard


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=60),
    st.integers(1, 8),
    st.integers(40, 200),
    st.randoms(use_true_random=False),
)
def test_processes_that_confirm_after_an_exchange_never_overshoot(
    steps: list[tuple[float, int, int]], requests: int, tokens: int, draw: random.Random
) -> None:
    """Whatever is let in at once everywhere, and in whatever order they exchange and look again."""
    counters, limiters = Counters(), [RateLimiter() for _ in range(3)]
    subjects = [_subject(requests_per_minute=requests), _subject("key:k", tokens_per_minute=tokens)]
    unconfirmed: list[tuple[int, Grant]] = []
    let_in: list[tuple[float, int]] = []
    now = _START
    for elapsed, asked, process in steps:
        if elapsed > 2:  # else it comes at the same moment as the one before
            draw.shuffle(unconfirmed)
            for by, grant in unconfirmed:
                counters.share(limiters[by], now)
                confirmed = limiters[by].confirm(grant, subjects, now)
                if isinstance(confirmed, Grant):
                    limiters[by].leave(confirmed)
                    let_in.append((now, confirmed.tokens))
            unconfirmed.clear()
            now += elapsed
        came = limiters[process].admit(subjects, asked, now)
        if isinstance(came, Grant):
            unconfirmed.append((process, came))
        assert _most_in_a_minute((at, 1) for at, _ in let_in) <= requests
        assert _most_in_a_minute(let_in) <= tokens
    for by, grant in unconfirmed:
        limiters[by].withdraw(grant)
    for limiter in limiters:
        counters.share(limiter, now)
    counted, expected = Counter[int](), Counter[int]()
    for (rate, slot), amount in counters.amounts.items():
        if rate.endswith("/tokens") and slot >= oldest_slot(now):
            counted[slot] += amount
    for at, amount in let_in:
        if slot_of(at) >= oldest_slot(now):
            expected[slot_of(at)] += amount
    assert +counted == expected  # nothing that still counts is counted but what was let in


@given(_STEPS, st.integers(1, 12), st.integers(40, 200))
def test_what_one_process_lets_in_it_confirms(
    steps: list[tuple[float, int, int, bool]], requests: int, tokens: int
) -> None:
    counters, limiter = Counters(), RateLimiter()
    subjects = [
        _subject(requests_per_minute=requests, concurrent_requests=1),
        _subject("key:k", tokens_per_minute=tokens),
    ]
    now = _START
    for elapsed, asked, _, shares in steps:
        now += elapsed
        came = limiter.admit(subjects, asked, now)
        if shares:
            counters.share(limiter, now)
        if isinstance(came, Grant):
            confirmed = limiter.confirm(came, subjects, now)
            assert isinstance(confirmed, Grant)
            limiter.leave(confirmed)


def test_a_request_that_is_withdrawn_counts_for_nothing() -> None:
    here, there, counters = RateLimiter(), RateLimiter(), Counters()
    subjects = [_subject(requests_per_minute=2, tokens_per_minute=100, concurrent_requests=1)]
    first, second = (limiter.admit(subjects, 60, _START) for limiter in (here, there))
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    for limiter in (here, there):
        counters.share(limiter, _START)
    first = here.confirm(first, subjects, _START)
    assert isinstance(first, Grant)
    refused = there.confirm(second, subjects, _START)
    assert isinstance(refused, Refusal)
    assert (refused.quota, refused.used, refused.asked) == ("tokens_per_minute", 60, 60)
    assert refused.wait is not None
    for limiter in (there, here):
        counters.share(limiter, _START)
    assert [limiter.standing(subjects, "tokens", _START).remaining for limiter in (here, there)] == [40, 40]  # type: ignore[union-attr]
    assert (here.inside("tenant:a"), there.inside("tenant:a")) == (1, 0)
    here.learn_inside({"tenant:a": 1})
    again = here.confirm(first, subjects, _START)
    assert isinstance(again, Refusal)
    assert again.quota == "concurrent_requests"
    assert here.inside("tenant:a") == 1  # elsewhere


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), min_size=1, max_size=30), st.integers(1, 60))
def test_a_refusal_says_when_there_is_room(steps: list[tuple[float, int]], asked: int) -> None:
    limiter, subjects = RateLimiter(), [_subject(tokens_per_minute=60)]
    now = _START
    for elapsed, tokens in steps:
        now += elapsed
        limiter.admit(subjects, tokens, now)
    came = limiter.admit(subjects, asked, now)
    if isinstance(came, Grant):
        return
    assert came.wait is not None
    assert 0 < came.wait <= PERIOD + SLOT
    assert isinstance(limiter.admit(subjects, asked, now + came.wait - 0.001), Refusal)
    assert isinstance(limiter.admit(subjects, asked, now + came.wait), Grant)


def test_a_request_larger_than_a_limit_is_told_that_it_never_fits() -> None:
    limiter = RateLimiter()
    came = limiter.admit([_subject(tokens_per_minute=100)], 101, _START)
    assert came == Refusal("tenant:a", "tokens_per_minute", 100, 0, 101, None)
    # Nothing was counted.
    assert isinstance(limiter.admit([_subject(tokens_per_minute=100)], 100, _START), Grant)


def test_of_two_limits_the_one_that_lasts_longest_is_told() -> None:
    limiter = RateLimiter()
    subjects = [_subject(requests_per_minute=1), _subject("key:k", tokens_per_minute=10)]
    assert isinstance(limiter.admit(subjects, 5, _START), Grant)
    came = limiter.admit(subjects, 20, _START + 1)
    assert isinstance(came, Refusal)
    assert (came.subject, came.wait) == ("key:k", None)
    came = limiter.admit(subjects, 1, _START + 1)
    assert isinstance(came, Refusal)
    assert (came.subject, came.quota) == ("tenant:a", "requests_per_minute")


@pytest.mark.parametrize("used", [0, 10, 50, 90])
def test_a_request_counts_with_what_it_used_once_that_is_known(used: int) -> None:
    limiter, subjects = RateLimiter(), [_subject(tokens_per_minute=100)]
    came = limiter.admit(subjects, 50, _START)
    assert isinstance(came, Grant)
    limiter.settle(came, used, _START + 1)
    standing = limiter.standing(subjects, "tokens", _START + 1)
    assert standing is not None
    assert (standing.limit, standing.remaining) == (100, 100 - used)
    assert (standing.reset > 0) == (used > 0)


def test_tokens_beyond_the_reservation_count_from_when_they_are_known() -> None:
    limiter, subjects = RateLimiter(), [_subject(tokens_per_minute=100)]
    came = limiter.admit(subjects, 10, _START)
    assert isinstance(came, Grant)
    # Something of the rate is used meanwhile, so that it is not forgotten.
    limiter.admit(subjects, 1, _START + 50)
    limiter.settle(came, 70, _START + 55)
    # The 10 of the reservation are gone by now, the 60 more are not.
    standing = limiter.standing(subjects, "tokens", _START + 70)
    assert standing is not None
    assert standing.remaining == 100 - 60 - 1


def test_requests_at_once_are_counted_here_and_elsewhere_and_left_once() -> None:
    limiter, subjects = RateLimiter(), [_subject(concurrent_requests=3)]
    limiter.learn_inside({"tenant:a": 1})
    first, second = (limiter.admit(subjects, 1, _START) for _ in range(2))
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    came = limiter.admit(subjects, 1, _START)
    assert came == Refusal("tenant:a", "concurrent_requests", 3, 3, 1, 1.0)
    assert limiter.inside_here == {"tenant:a": 2}
    limiter.leave(first)
    limiter.leave(first)
    assert limiter.inside_here == {"tenant:a": 1}
    assert isinstance(limiter.admit(subjects, 1, _START), Grant)


def test_a_process_knows_what_others_counted_before_it_is_asked() -> None:
    """Or each process lets in all that the limit allows once more, and so does each restart."""
    counters, subjects = Counters(), [_subject(requests_per_minute=4)]
    here, there = RateLimiter(), RateLimiter()
    counters.share(there, _START)
    for seconds in range(4):
        assert isinstance(here.admit(subjects, 1, _START + seconds), Grant)
        counters.share(here, _START + seconds)
        counters.share(there, _START + seconds)
    assert [*there.standings(_START + 4)] == []
    assert isinstance(there.admit(subjects, 1, _START + 12), Refusal)
    restarted = RateLimiter()
    counters.share(restarted, _START + 12)
    assert isinstance(restarted.admit(subjects, 1, _START + 12), Refusal)
    late = _START + PERIOD + SLOT + 3
    for limiter in (there, restarted):
        counters.share(limiter, late)
        assert isinstance(limiter.admit(subjects, 1, late), Grant)


def test_what_could_not_be_handed_over_is_handed_over_later_and_counted_once() -> None:
    counters, subjects = Counters(), [_subject(tokens_per_minute=100)]
    here, there = RateLimiter(), RateLimiter()
    here.admit(subjects, 30, _START)
    assert here.take_changes(_START)[0] != []
    here.admit(subjects, 5, _START)
    here.put_back()
    counters.share(here, _START)
    counters.share(here, _START)
    there.admit(subjects, 1, _START)
    counters.share(there, _START)
    for limiter, others in ((here, 0), (there, 35)):
        standing = limiter.standing(subjects, "tokens", _START)
        assert standing is not None
        assert standing.remaining == 100 - 35 - (1 if others else 0)


def test_a_long_outage_leaves_nothing_behind_but_its_last_minute() -> None:
    counters, subjects = Counters(), [_subject(tokens_per_minute=100)]
    limiter, now = RateLimiter(), _START
    for _ in range(50):
        now += PERIOD + SLOT
        assert isinstance(limiter.admit(subjects, 100, now), Grant)
        limiter.take_changes(now)
        limiter.put_back()
    counters.share(limiter, now)
    assert sum(counters.amounts.values()) == 100


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        (COMPLETION_URL, {"prompt": "x" * 40, "max_tokens": 7}, 17),
        (COMPLETION_URL, {"prompt": "x" * 41}, 11 + 256),
        (COMPLETION_URL, {"prompt": ["x" * 40, "y" * 4], "max_tokens": 7, "n": 3}, 11 + 2 * 3 * 7),
        (COMPLETION_URL, {"prompt": [1, 2, 3], "max_tokens": 1}, 4),
        (COMPLETION_URL, {"prompt": [[1, 2, 3], [4]], "max_tokens": 1}, 6),
        (
            CHAT_URL,
            {"messages": [{"role": "user", "content": "x" * 8}], "max_completion_tokens": 9, "max_tokens": 1},
            11,
        ),
        (
            CHAT_URL,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 8}]}], "max_tokens": 1},
            3,
        ),
        (CHAT_URL, {"messages": [], "tools": [{"type": "function"}], "max_tokens": 1}, 6 + 1),
        (CHAT_URL, {"messages": [], "tools": [{"a": 1}], "tool_choice": "none", "max_tokens": 1}, 1),
        (CHAT_URL, {"messages": [], "tools": None, "response_format": None, "max_tokens": 1}, 1),
        (CHAT_URL, {"messages": [], "response_format": {"type": "x" * 29}, "max_tokens": 1}, 10 + 1),
        (CHAT_URL, {"messages": [], "tools": ["\ud800"], "max_tokens": 1}, 1),
        (RESPONSES_URL, {"input": "x", "text": {"format": {"type": "x" * 29}}, "max_output_tokens": 1}, 1 + 10 + 1),
        (SCORE_URL, {"queries": "x" * 8, "items": ["y" * 4, "z" * 4]}, 2 + 2 * 2),
        (EMBEDDINGS_URL, {"input": ["x" * 8] * 3}, 6),
        (EMBEDDINGS_URL, {"input": "x" * 8, "max_tokens": 100}, 2),
        (COMPLETION_URL, {"prompt": None, "max_tokens": "many", "n": -1}, 256),
        (CHAT_URL, {"messages": ["x", {"content": 5}, {"content": [1, {"text": 2}]}]}, 256),
        (CHAT_URL, {"messages": 5}, 256),
        (EMBEDDINGS_URL, {"input": {"a": 1}}, 0),
    ],
)
def test_estimates(endpoint: str, body: dict[str, object], tokens: int) -> None:
    assert tokens_of_request(endpoint, body) == tokens


def test_bytes_are_rounded_up() -> None:
    assert [tokens_of_bytes(size) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_quotas_fall_back_to_defaults_field_by_field() -> None:
    own, defaults = Quotas(storage_bytes=5), Quotas(storage_bytes=1, enqueued_lines=2)
    assert own.over(defaults) == Quotas(storage_bytes=5, enqueued_lines=2)
    assert of_values(own.as_values()) == own
    assert of_values({"of a later version": 1}) == Quotas()


@pytest.mark.parametrize("value", [0, -1, 2**53 + 1, True, 1.5, "1"])
def test_what_cannot_be_a_quota_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^storage_bytes="):
        of_values({"storage_bytes": value})
