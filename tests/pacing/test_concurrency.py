"""How many requests at once are found to deliver the most, from servers whose throughput is known."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.pacing.concurrency import ConcurrencyCap, ConcurrencySearch, alike
from batchwright.pacing.pacer import Pacer

MOST = 1000
FIRST_SHARE = 0.1
"""Of the job, in which the number is to be found."""


@dataclass(frozen=True, slots=True)
class Server:
    """Computes tokens of all requests at once: as fast as one alone up to `knee`, from where on it shares."""

    knee: int
    tokens_a_second: float = 50.0
    """Of one request, while there are few."""
    prefill: float = 0.05
    noise: float = 0.0
    """Deviation of the logarithm of latencies."""
    decline: float = 0.0
    """Share of the throughput that is lost for each `knee` of requests beyond it."""
    answer: Callable[[random.Random], int] = lambda draw: draw.randint(50, 150)
    errors: float = 0.0
    """Share of requests that fail with a 503, whatever the load."""
    breaks_at: int = MOST
    """Requests at once beyond which it answers 503 to the rest."""

    def speed(self, under_way: int) -> float:
        """Tokens a second of each request."""
        beyond = max(0.0, under_way / self.knee - 1.0)
        shared = self.tokens_a_second * min(1.0, self.knee / under_way)
        return shared * max(0.1, 1.0 - self.decline * beyond)


@dataclass(slots=True)
class Job:
    """What became of a job."""

    requests: int
    ended: list[tuple[float, float]] = field(default_factory=list)
    """When answers came, and the tokens that had been computed by then, those of unfinished answers included."""
    levels: list[int] = field(default_factory=list)
    """Requests at once that were allowed, at each answer."""
    sent: int = 0
    all_sent: int | None = None
    """Number of answers when the last request was sent."""

    @property
    def throughput(self) -> float:
        """Tokens a second from the first tenth of the answers on, as long as there are more requests to be sent."""
        first = self.ended[int(FIRST_SHARE * self.requests)]
        last = self.ended[min(len(self.ended) - 1, self.all_sent or len(self.ended))]
        return (last[1] - first[1]) / (last[0] - first[0])


def work(server: Server, pacer: Pacer, *, requests: int = 2000, seed: int = 0) -> Job:
    """Let the server compute so many answers, processor sharing: each moves on at the speed of the moment."""
    draw, job, serial = random.Random(seed), Job(requests), itertools.count()
    now = progress = computed = 0.0
    """`progress`: tokens that a request has got which was there from the beginning."""
    running: list[tuple[float, int, int, object]] = []
    """Heap of requests by the progress at which they end."""
    failing: list[tuple[float, int, object]] = []
    rings_at = 0.0
    while len(job.ended) < requests:
        use = pacer.expected.of(20.0, None)
        while job.sent < requests:
            wait = pacer.wait(use, now)
            if wait > 1e-9:
                rings_at = now + wait
                break
            attempt = pacer.begin(use, now)
            job.sent += 1
            if job.sent == requests:
                job.all_sent = len(job.ended)
            if draw.random() < server.errors or len(running) >= server.breaks_at:
                heapq.heappush(failing, (now + 0.05, next(serial), attempt))
                continue
            tokens = server.answer(draw)
            length = (tokens + server.prefill * server.tokens_a_second) * draw.lognormvariate(0.0, server.noise)
            heapq.heappush(running, (progress + length, next(serial), tokens, attempt))
        speed = server.speed(len(running)) if running else 0.0
        times = [now + (running[0][0] - progress) / speed] if running else []
        times += [failing[0][0]] if failing else []
        times += [rings_at] if now < rings_at < float("inf") else []
        then = max(now, min(times))
        progress += (then - now) * speed
        computed += (then - now) * speed * len(running)
        now = then
        while failing and failing[0][0] <= now:
            pacer.overloaded(heapq.heappop(failing)[2], now)  # type: ignore[arg-type]
            job.sent -= 1
        while running and running[0][0] <= progress + 1e-9:
            _, _, tokens, done = heapq.heappop(running)
            pacer.succeeded(done, now, input_tokens=20, output_tokens=tokens)  # type: ignore[arg-type]
            job.ended.append((now, computed))
            job.levels.append(pacer.concurrency)
    return job


def best(server: Server) -> float:
    """Return the throughput of the best fixed number of requests at once."""
    return max(level * server.speed(level) for level in range(1, MOST + 1))


def long_answers(draw: random.Random) -> int:
    return round(min(4000.0, max(20.0, draw.lognormvariate(5.5, 1.0))))


SERVERS = {
    "knee 8": Server(8),
    "knee 32": Server(32),
    "knee 64": Server(64),
    "knee 128": Server(128),
    "knee 32, noise": Server(32, noise=0.3),
    "knee 64, noise": Server(64, noise=0.3),
    "knee 32, long answers": Server(32, answer=long_answers),
    "knee 64, long answers": Server(64, answer=long_answers),
    "slow prefill": Server(48, prefill=1.0),
    "beyond the knee it loses": Server(48, decline=0.1),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SERVERS)
def test_what_delivers_the_most_is_found_in_the_first_tenth_of_a_job(name: str, seed: int) -> None:
    server = SERVERS[name]
    job = work(server, Pacer(MOST), seed=seed)
    # Where more at once deliver less, what the search tries from time to time costs something.
    least = 0.75 if server.decline else 0.97
    assert job.throughput >= least * best(server)
    # Further requests at once would only wait longer in the server.
    assert max(job.levels) <= max(128, 8 * server.knee)


@pytest.mark.parametrize("seed", range(3))
def test_errors_that_do_not_come_from_load_do_not_make_it_smaller(seed: int) -> None:
    server = Server(32, errors=0.05)
    job = work(server, Pacer(MOST), seed=seed)
    assert job.throughput >= 0.97 * best(server)
    assert min(job.levels[200:]) >= 32


@pytest.mark.parametrize("breaks_at", [5, 40, 100])
def test_it_shrinks_where_more_at_once_are_refused(breaks_at: int) -> None:
    server = Server(1000, breaks_at=breaks_at)
    job = work(server, Pacer(MOST))
    later = sorted(job.levels[500:])
    assert later[len(later) // 2] <= 1.3 * breaks_at
    assert job.throughput >= 0.7 * breaks_at * server.tokens_a_second


def test_most_is_never_exceeded() -> None:
    for most in (1, 2, 7, 100):
        job = work(Server(1000), Pacer(most), requests=600)
        assert max(job.levels) == most


def test_a_level_that_nobody_fills_teaches_nothing() -> None:
    search = ConcurrencySearch(64, first=16)
    for _ in range(200):
        search.succeeded(search.epoch, 3, 100.0, 1.0)
    assert search.value == 16


def test_a_request_of_an_earlier_level_teaches_nothing() -> None:
    search = ConcurrencySearch(64, first=16)
    for _ in range(50):
        search.succeeded(search.epoch - 1, 16, 100.0, 1.0)
        assert not search.overloaded(search.epoch - 1)
    assert search.value == 16


@pytest.mark.parametrize("most", [0, -1, True, 1.5])
def test_a_concurrency_that_is_none(most: int) -> None:
    with pytest.raises(ValueError, match="max_concurrency="):
        ConcurrencySearch(most)


events = st.lists(
    st.tuples(
        st.sampled_from(["answer", "overload", "raise", "lower", "guide"]),
        st.floats(0.0, 1e6),
        st.integers(1, 1000),
        st.integers(0, 2),
    ),
    max_size=80,
)


@given(st.integers(1, 1000), st.integers(1, 1000), events)
def test_whatever_happens_the_level_is_from_one_to_most(
    most: int, first: int, each: list[tuple[str, float, int, int]]
) -> None:
    search = ConcurrencySearch(most, first=first)
    for event, number, under_way, ago in each:
        epoch, before = search.epoch, search.value
        match event:
            case "answer":
                search.succeeded(epoch - ago, under_way, number, number / 7.0)
            case "overload":
                assert search.overloaded(epoch - ago) == (search.epoch != epoch)
                assert search.value <= before
            case "raise":
                search.raise_to(number)
                assert search.value >= before
            case "lower":
                search.lower_to(number)
                assert search.value <= before
            case "guide":
                search.guide(number, under_way, min(under_way, before))
        assert 1 <= search.value <= most
        assert search.epoch >= epoch


@given(st.integers(1, 500), st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=200))
def test_a_cap_is_below_what_was_refused(value: int, each: list[tuple[bool, int]]) -> None:
    cap = ConcurrencyCap(value)
    for is_refused, under_way in each:
        if is_refused:
            cap.refused(under_way)
            assert cap.value < under_way or cap.value == 1
        else:
            cap.succeeded(cap.epoch, under_way)
        assert cap.value >= 1


def test_a_cap_probes_for_a_higher_one_less_often_the_more_often_that_fails() -> None:
    """As against a provider that accepts 20 at once."""
    cap, probes, answers = ConcurrencyCap(25), [], 0
    while answers < 20_000:
        if cap.value > 20:
            cap.refused(cap.value)
            probes.append(answers)
        else:
            cap.succeeded(cap.epoch, cap.value)
            answers += 1
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes) if later > earlier]
    assert cap.value == 20
    assert gaps[1:] == sorted(gaps[1:]), "the first one was from where it began"
    assert len(probes) < 40


def test_a_cap_follows_a_limit_that_is_raised() -> None:
    cap, answers = ConcurrencyCap(10), 0
    while cap.value < 100:
        cap.succeeded(cap.epoch, cap.value)
        answers += 1
    assert answers < 1000


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=5), st.floats(0.0, 0.5))
def test_alike(values: list[int], spread: float) -> None:
    assert alike(values, spread) == (max(values) - min(values) <= max(2, int(spread * max(values))))


def test_a_number_that_another_process_learned_later_is_taken_over() -> None:
    cap = ConcurrencyCap(20)
    cap.take_over(10, 0)
    assert cap.value == 20, "it is no later"
    cap.take_over(30, 0)
    cap.take_over(25, 3)
    assert (cap.value, cap.epoch) == (25, 3)
    for _ in range(1000):
        cap.succeeded(cap.epoch, 25, may_probe=False)
    assert cap.value == 25, "another process tries more"
    cap.refused(25)
    assert (cap.value, cap.epoch) == (24, 4)
    cap.take_over(25, 3)
    assert cap.value == 24, "it was known before"
