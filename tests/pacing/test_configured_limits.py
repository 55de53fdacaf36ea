"""Limits that a user states are kept in every window, and used as far as they go: over drawn histories of requests."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.attempt import Attempt
from batchwright.pacing.limits import ConfiguredLimit, Use, configured_limits
from batchwright.pacing.pacer import Pacer
from batchwright.pacing.sharing import ALL, Sharing
from batchwright.pacing.sliding_window import SlidingWindow

ROUNDING = 1e-4
"""Seconds by which the gate lets requests go early."""
MOST = 10_000
"""Requests at once: more than any of these histories has."""

Outcome = Literal["answered", "refused", "overloaded", "failed"]


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and what becomes of it."""

    pause: float
    """Seconds for which the source has nothing before it."""
    expected: Use
    used: Use
    latency: float
    outcome: Outcome


@dataclass(slots=True)
class Entry:
    """What a request counts for, as far as it is known."""

    at: float
    counts: Use
    outcome: Outcome | None = None


@dataclass(slots=True)
class History:
    """What a pacer did with requests."""

    entries: list[Entry] = field(default_factory=list)


def amount(entry: Entry, told: ConfiguredLimit) -> float:
    return entry.counts.of(told.kind)


def play(pacer: Pacer, told: Sequence[ConfiguredLimit], requests: Sequence[Request]) -> History:
    """Send `requests` in order, each as soon as it is there and may go, and check each that goes."""
    history, now = History(), 0.0
    ends: list[tuple[float, int, Request, Attempt, Entry]] = []
    serial = itertools.count()

    def end_until(time: float) -> bool:
        """End what ends by then; return whether anything did."""
        is_any = bool(ends) and ends[0][0] <= time
        while ends and ends[0][0] <= time:
            at, _, request, attempt, entry = heapq.heappop(ends)
            entry.outcome = request.outcome
            match request.outcome:
                case "answered":
                    entry.counts = request.used
                    used = int(request.used.input_tokens), int(request.used.output_tokens)
                    pacer.succeeded(attempt, at, input_tokens=used[0], output_tokens=used[1])
                case "refused":
                    entry.counts = Use(0.0, 0.0)
                    pacer.refused(attempt, at)
                case "overloaded":
                    entry.counts = Use(0.0, 0.0)
                    pacer.overloaded(attempt, at)
                case "failed":
                    pacer.failed(attempt)
        return is_any

    for request in requests:
        now += request.pause
        end_until(now)
        was_named = False
        while (wait := pacer.wait(request.expected, now)) > ROUNDING:
            assert not was_named, "nothing has happened since, so what was said comes true"
            named = now + wait
            now = min(named, ends[0][0]) if ends else named
            assert now < math.inf, "it waits for the end of a request, and none is under way"
            was_named = not end_until(now)
        attempt = pacer.begin(request.expected, now)
        entry = Entry(now, request.expected)
        history.entries.append(entry)
        heapq.heappush(ends, (now + request.latency, next(serial), request, attempt, entry))
        for each in told:
            within = [amount(other, each) for other in history.entries if other.at > now - each.window]
            assert sum(within) <= each.limit * (1 + 1e-9) + 1e-6 or sum(within) == within[-1]
    end_until(math.inf)
    return history


KINDS: list[Literal["requests", "tokens", "input_tokens", "output_tokens"]] = [
    "requests",
    "tokens",
    "input_tokens",
    "output_tokens",
]
limits = st.one_of(
    st.builds(
        ConfiguredLimit,
        st.just("requests"),
        st.one_of(st.integers(1, 50).map(float), st.floats(1.0, 5e3)),
        st.sampled_from([0.1, 1.0, 10.0, 60.0, 86_400.0]),
    ),
    st.builds(
        ConfiguredLimit, st.sampled_from(KINDS[1:]), st.floats(100.0, 5e4), st.sampled_from([1.0, 10.0, 60.0, 86_400.0])
    ),
)
tokens = st.integers(0, 400).map(float)


@st.composite
def requests(draw: st.DrawFn, *, outcomes: Sequence[Outcome], spared: bool) -> Request:
    """Requests that use as much as is expected or, if not `spared`, more."""
    expected = Use(draw(tokens), draw(tokens))
    share = draw(st.sampled_from([0.0, 0.3, 1.0] if spared else [0.0, 0.5, 1.0, 3.0]))
    used = Use(float(int(expected.input_tokens * share)), float(int(expected.output_tokens * share)))
    return Request(
        draw(st.sampled_from([0.0, 0.0, 0.0, 0.01, 1.0, 30.0, 3600.0])),
        expected,
        used,
        draw(st.sampled_from([0.0, 0.05, 1.0, 20.0, 300.0])),
        draw(st.sampled_from(outcomes)),
    )


ANY: list[Outcome] = ["answered", "answered", "answered", "failed", "refused", "overloaded"]


@given(
    st.lists(limits, min_size=1, max_size=3),
    st.lists(requests(outcomes=ANY, spared=False), min_size=1, max_size=40),
)
def test_what_is_known_to_count_never_exceeds_a_limit_in_any_window(
    told: list[ConfiguredLimit], each: list[Request]
) -> None:
    play(Pacer(MOST, told, first=MOST), told, each)


@given(
    st.lists(limits, min_size=1, max_size=3),
    st.lists(requests(outcomes=["answered", "failed"], spared=True), min_size=1, max_size=40),
)
def test_what_was_used_never_exceeds_a_limit_in_any_window(told: list[ConfiguredLimit], each: list[Request]) -> None:
    """Where no request uses more than was expected, windows that are looked at afterwards hold too."""
    history = play(Pacer(MOST, told, first=MOST), told, each)
    for limit in told:
        for last in history.entries:
            within = [amount(entry, limit) for entry in history.entries if last.at - limit.window < entry.at <= last.at]
            # Of one that was larger than the limit, what it used may be less than that, so others may have come to it.
            largest = max(request.expected.of(limit.kind) for request in each)
            assert sum(within) <= max(limit.limit, largest) * (1 + 1e-9) + 1e-6


@given(limits, st.lists(st.tuples(tokens, tokens), min_size=1, max_size=60))
def test_a_limit_is_used_as_far_as_it_goes(told: ConfiguredLimit, sizes: list[tuple[float, float]]) -> None:
    """While work waits, no stretch of time has less than the even rate, but for what single requests leave free.

    From any request on, what went until now is at least: the rate times the time, less the request that is worked off;
    and for each whole window the limit, less a request that did not fit in any more. The lower of the two counts.
    """
    pacer, now = Pacer(MOST, [told], first=MOST), 0.0
    sent: list[tuple[float, float]] = []
    length = SlidingWindow(told)._length
    rate = told.limit / length
    largest = max(Use(*size).of(told.kind) for size in sizes)
    for size in sizes:
        use = Use(*size)
        waited = 0.0
        while (wait := pacer.wait(use, now)) > 0.0:
            assert math.isfinite(wait)
            assert waited == 0.0 or wait < 1e-6, "a wait that is named is enough"
            waited += wait
            now += wait
            if wait < 1e-9:
                break
        pacer.succeeded(
            pacer.begin(use, now), now, input_tokens=int(use.input_tokens), output_tokens=int(use.output_tokens)
        )
        sent.append((now, use.of(told.kind)))
        for start, _ in sent:
            stretch = sum(part for at, part in sent if start <= at < now)
            windows = math.floor((now - start) / length)
            # Within a window the pace may be a request behind; at its end as much may not have fitted in.
            least = min(rate * (now - start) - largest, windows * (told.limit - largest)) - largest
            # 640 requests a second are let through beside the limit.
            assert stretch >= least - 1e-6 * told.limit or rate > 640.0


@given(limits, st.lists(st.tuples(tokens, tokens, st.floats(0.0, 100.0)), min_size=1, max_size=40))
def test_no_wait_is_longer_than_the_window_and_the_pace_need(
    told: ConfiguredLimit, sizes: list[tuple[float, float, float]]
) -> None:
    window, now = SlidingWindow(told), 0.0
    length = window._length
    entries: list[tuple[float, float]] = []
    for first, second, pause in sizes:
        now += pause
        use = Use(first, second)
        wait = window.wait(use, now)
        # By definition: when enough of what counts has left the window, and when the request before is worked off.
        counting = [(at, part) for at, part in entries if at > now - length]
        excess = sum(part for _, part in counting) + use.of(told.kind) - told.limit
        allowed = now
        for at, part in counting:
            if excess <= 1e-9:
                break
            excess -= part
            allowed = at + length
        before = sum(part for _, part in entries[-1:])
        assert wait <= max(allowed - now, before * length / told.limit) * (1 + 1e-9) + 1e-6
        assert wait >= allowed - now - 1e-6
        now += wait
        assert window.wait(use, now) <= 1e-6 + 1e-9 * now
        window.begin(use, now)
        entries.append((now, use.of(told.kind)))


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_a_limit_must_allow_something(value: float) -> None:
    with pytest.raises(ValueError, match="rpm="):
        configured_limits(rpm=value)
    with pytest.raises(ValueError, match="tpm="):
        configured_limits(tpm=value)


def test_limits_as_they_are_given() -> None:
    assert configured_limits() == ()
    assert configured_limits(60, 1000.5) == (
        ConfiguredLimit("requests", 60.0, 60.0),
        ConfiguredLimit("tokens", 1000.5, 60.0),
    )


def test_the_same_outcome_twice_is_a_mistake() -> None:
    pacer = Pacer(4)
    attempt = pacer.begin(Use(1.0, 1.0), 0.0)
    pacer.failed(attempt)
    with pytest.raises(RuntimeError, match="twice"):
        pacer.succeeded(attempt, 1.0, input_tokens=1, output_tokens=1)
    assert pacer.under_way == 0


USE = Use(10.0, 20.0)


def sent_in(window: SlidingWindow, start: float, end: float, step: float = 0.01) -> int:
    """Requests that go between two times, as soon as each may."""
    count = 0
    for tick in range(math.ceil(start / step), math.ceil(end / step)):
        while window.wait(USE, tick * step) <= ROUNDING:
            window.begin(USE, tick * step)
            count += 1
    return count


def beside(**note: float) -> Sharing:
    """What is known of one other process."""
    sharing = Sharing()
    sharing.learn([{name.replace("_", " "): value for name, value in note.items()}], 0.0)
    return sharing


@pytest.mark.parametrize(
    ("used", "wanted", "least", "most"),
    [
        (0.0, 0.0, 57, 59),
        (0.0, ALL, 28, 30),
        (0.0, 0.25, 43, 45),
        (30.0, 0.0, 26, 29),
        (10.0, ALL, 28, 30),
        (45.0, ALL, 12, 14),
        (60.0, ALL, 0, 0),
        (1e6, 0.0, 0, 0),
    ],
)
def test_what_others_use_or_want_of_a_shared_limit_is_left_to_them(
    used: float, wanted: float, least: int, most: int
) -> None:
    window = SlidingWindow(ConfiguredLimit("requests", 60.0))
    window.share(beside(requests=used, requests_wanted=wanted))
    assert least <= sent_in(window, 0.0, 60.0) <= most
    wait = window.wait(USE, 60.0)
    assert 0.0 <= wait <= 61.0


def test_when_the_others_are_gone_all_of_a_shared_limit_is_used() -> None:
    window = SlidingWindow(ConfiguredLimit("requests", 60.0))
    window.share(beside(requests=60.0))
    assert sent_in(window, 0.0, 60.0) == 0
    assert 0.0 < window.wait(USE, 60.0) <= 1.0, "what others use is looked at again soon"
    window.share(Sharing())
    assert 59 <= sent_in(window, 60.0, 120.0) <= 61


def test_a_pacer_tells_what_it_uses_and_heeds_what_others_use_by_kind() -> None:
    pacer = Pacer(10, [ConfiguredLimit("requests", 2.0), ConfiguredLimit("tokens", 1000.0)], first=10)
    attempt = pacer.begin(USE, 0.0)

    def told(now: float) -> tuple[float | None, float | None]:
        note = pacer.note(now)
        return note.get("requests"), note.get("tokens")

    assert told(0.0) == (1.0, 30.0)
    pacer.share([{"requests": 0.0, "tokens": 0.0}, {"requests": 1.0}], 0.0)
    assert 59.0 <= pacer.wait(USE, 1.0) <= 61.0
    pacer.share([], 31.0)
    assert 29.0 <= pacer.wait(USE, 31.0) <= 30.0, "what ended processes used counts on"
    pacer.succeeded(attempt, 32.0, input_tokens=100, output_tokens=50)
    assert told(32.0) == (1.0, 150.0)
    pacer.share([], 61.0)
    assert pacer.wait(USE, 61.0) == 0.0
    assert told(100.0) == (None, None), "there is nothing to tell"


def test_a_new_process_waits_until_it_has_heard_what_others_use() -> None:
    pacer = Pacer(10, [ConfiguredLimit("requests", 60.0)])
    pacer.share([], 10.0, since=10.0)
    assert 2.0 <= pacer.wait(USE, 10.0) <= 3.0
    pacer.share([], 13.0, since=10.0)
    assert pacer.wait(USE, 13.0) == 0.0
    untold = Pacer(10)
    untold.share([], 10.0, since=10.0)
    assert untold.wait(USE, 10.0) == 0.0
