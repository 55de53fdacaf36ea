"""When an endpoint is looked at, in virtual time, and what is told of it."""

from __future__ import annotations

import asyncio
import math

import pytest

from batchwright.clock import ManualClock
from batchwright.errors import EndpointDown, EndpointUnreachable
from batchwright.inference.endpoint_watch import Availability, EndpointWatch
from batchwright.testing import play


def test_pauses_double_up_to_the_longest_and_begin_anew_after_an_answer() -> None:
    state = Availability(first_pause=1.0, longest_pause=5.0)
    assert (state.down, state.until_probe(0.0)) == (False, 0.0)
    pauses = []
    for _ in range(4):
        state.silent(10.0)
        pauses.append(state.until_probe(10.0))
    assert (state.down, pauses) == (True, [1.0, 2.0, 4.0, 5.0])
    state.answered(20.0)
    assert (state.down, state.until_probe(20.5)) == (False, 0.5)
    state.silent(30.0)
    assert state.until_probe(30.25) == 0.75


class Endpoint:
    """Answers probes from a point in time on."""

    def __init__(self, clock: ManualClock, answers_at: float) -> None:
        self.clock = clock
        self.answers_at = answers_at
        self.probed_at: list[float] = []

    async def probe(self) -> None:
        self.probed_at.append(self.clock.now())
        if self.clock.now() < self.answers_at:
            raise EndpointUnreachable("http://inside:8000/v1 gave no answer")


def test_it_is_probed_with_growing_pauses_until_it_answers_and_not_after() -> None:
    async def main(clock: ManualClock) -> None:
        endpoint = Endpoint(clock, answers_at=100.0)
        watch = EndpointWatch(endpoint.probe)
        for _ in range(3):
            watch.suspect()
        await asyncio.sleep(6.5)
        assert watch.down
        with pytest.raises(EndpointDown, match=r"^the endpoint does not answer: try again later$") as caught:
            watch.require_answering()
        assert caught.value.retry_after == 1.0
        await asyncio.sleep(1000.0)
        assert not watch.down
        watch.require_answering()
        assert endpoint.probed_at == [0.0, 1.0, 3.0, 7.0, *(12.0 + 5.0 * number for number in range(19))]
        await watch.close()

    play(main)


def test_calls_that_fail_while_probes_succeed_lead_to_a_probe_a_second() -> None:
    async def main(clock: ManualClock) -> None:
        endpoint = Endpoint(clock, answers_at=0.0)
        watch = EndpointWatch(endpoint.probe)
        for _ in range(100):
            watch.suspect()
            await asyncio.sleep(0.1)
        assert not watch.down
        assert len(endpoint.probed_at) == pytest.approx(10, abs=1)
        await watch.close()

    play(main)


def test_a_call_that_is_answered_ends_the_outage_at_once() -> None:
    async def main(clock: ManualClock) -> None:
        endpoint = Endpoint(clock, answers_at=50.0)
        watch = EndpointWatch(endpoint.probe)
        watch.suspect()
        await asyncio.sleep(0.5)
        assert watch.down
        watch.answered()
        watch.require_answering()
        await watch.close()

    play(main)


def test_nothing_is_probed_after_the_end() -> None:
    async def main(clock: ManualClock) -> None:
        endpoint = Endpoint(clock, answers_at=math.inf)
        watch = EndpointWatch(endpoint.probe)
        await watch.close()
        watch.suspect()
        await asyncio.sleep(1000.0)
        assert endpoint.probed_at == []

    play(main)
