"""How long calls to an endpoint wait after refusals, in virtual time, with a provider in place of the connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import msgspec
import pytest

from batchwright.clock import ManualClock
from batchwright.errors import EndpointDown, EndpointError, EngineClosed
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.endpoint_client import EndpointClient, Heard
from batchwright.inference.endpoint_retries import RETRIES
from batchwright.inference.inference import Call
from batchwright.pacing.limits import configured_limits
from batchwright.request import Traffic
from batchwright.testing import play
from batchwright.wire.rate_limits import StatedLimit

Answer = Callable[["Provider"], EndpointError | float]
"""What becomes of a request: an error, or the seconds after which it is answered."""


class Provider:
    """Stands for a client of an endpoint: answers or refuses, and notes when it was asked."""

    url = "https://provider/v1"

    def __init__(self, clock: ManualClock, answer: Answer, identity: str = "a provider and a key") -> None:
        self.clock = clock
        self.identity = identity
        self.answer = answer
        self.asked_at: list[float] = []
        self.refused = 0
        self.under_way = 0
        self.peak = 0
        self.stated: list[StatedLimit] = []
        self.fails = False
        self.breaks: EndpointError | None = None
        """With what streams break in the middle."""

    async def send(self, path: str, body: bytes | None = None, heard: Heard | None = None) -> dict[str, Any]:
        model = msgspec.json.decode(body or b"{}").get("model")
        self.asked_at.append(self.clock.now())
        self.under_way += 1
        self.peak = max(self.peak, self.under_way)
        try:
            outcome = self.answer(self)
            if heard is not None and self.stated:
                heard(self.stated)
            if isinstance(outcome, EndpointError):
                self.refused += 1
                raise outcome
            await asyncio.sleep(outcome)
        finally:
            self.under_way -= 1
        usage = {"prompt_tokens": 10, "completion_tokens": 50}
        return {"id": "x", "object": "chat.completion", "model": model, "choices": [{"index": 0}], "usage": usage}

    async def stream(self, path: str, body: bytes, heard: Heard | None = None) -> AsyncGenerator[dict[str, Any]]:
        answer = await self.send(path, body, heard)
        usage = answer.pop("usage")
        yield answer
        if self.breaks is not None:
            raise self.breaks
        yield {**answer, "usage": usage}

    async def close(self) -> None:
        pass


class Longest(random.Random):
    """Draws the longest pauses."""

    def random(self) -> float:
        return 1.0


def endpoint_at(provider: Provider, **options: Any) -> EndpointInference:
    endpoint = EndpointInference("https://api.openai.com/v1", "key", **options)
    endpoint._client = cast("EndpointClient", provider)
    return endpoint


def call(traffic: Traffic = "batch", model: str = "m") -> Call:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60}
    return Call("/v1/chat/completions", body, "r", traffic, None)


def refusal(retry_after: float | None = None) -> EndpointError:
    return EndpointError("slow down", status=429, body={"message": "slow down"}, retry_after=retry_after)


def once(outcome: EndpointError) -> Answer:
    """Refuse the first request."""
    return lambda provider: outcome if len(provider.asked_at) == 1 else 0.1


@pytest.mark.parametrize(("told", "waited"), [(7.0, 7.0), (0.6, 0.6), (1e5, 600.0), (float("inf"), 600.0)])
def test_batch_calls_wait_as_long_as_they_are_told(told: float, waited: float) -> None:
    async def main(clock: ManualClock) -> Provider:
        provider = Provider(clock, once(refusal(told)))
        await endpoint_at(provider).answer(call())
        return provider

    assert play(main).asked_at == [0.0, pytest.approx(waited)]


def test_where_no_pause_is_named_it_is_short_and_grows() -> None:
    async def main(clock: ManualClock) -> list[float]:
        provider = Provider(clock, lambda provider: refusal() if len(provider.asked_at) <= 8 else 0.1)
        await endpoint_at(provider).answer(call())
        return provider.asked_at

    asked_at = play(main)
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert len(pauses) == 8
    assert 0.1 <= pauses[0] <= 1.0
    assert pauses[-1] > pauses[0]
    assert max(pauses) <= 10.0


def test_other_calls_to_the_same_model_wait_too_and_those_to_another_do_not() -> None:
    async def main(clock: ManualClock) -> list[float]:
        endpoint = endpoint_at(Provider(clock, once(refusal(20.0))))
        ended: list[float] = []

        async def answered(model: str, traffic: Traffic) -> None:
            await endpoint.answer(call(traffic, model))
            ended.append(clock.now())

        first = asyncio.ensure_future(answered("m", "batch"))
        await asyncio.sleep(1.0)
        await asyncio.gather(answered("m", "batch"), answered("other", "online"), first)
        return ended

    other, *waited = play(main)
    assert other == pytest.approx(1.1)
    assert min(waited) >= 20.0


def test_online_callers_are_told_of_a_long_pause_whoever_was_refused_and_do_not_wait_for_its_end() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda provider: refusal(20.0) if len(provider.asked_at) == 1 else 0.1)
        endpoint = endpoint_at(provider, max_concurrency=1)
        batch = asyncio.ensure_future(endpoint.answer(call("batch")))
        # One waits already when the refusal comes, and one comes later.
        waiting = asyncio.ensure_future(endpoint.answer(call("online")))
        await asyncio.sleep(5.0)
        later = asyncio.ensure_future(endpoint.answer(call("online")))
        await asyncio.sleep(0.01)
        assert waiting.done()
        assert later.done()
        for task, named in ((waiting, 20.0), (later, 15.0)):
            error = task.exception()
            assert isinstance(error, EndpointError)
            assert error.status == 429
            assert error.retry_after == pytest.approx(named)
        await batch
        await endpoint.answer(call("online"))
        assert (endpoint._waiting_online, endpoint._held.total(), endpoint._under_way) == (0, 0, 0)

    play(main)


def test_online_callers_wait_for_the_end_of_a_short_pause() -> None:
    async def main(clock: ManualClock) -> float:
        endpoint = endpoint_at(Provider(clock, once(refusal(1.5))))
        await asyncio.gather(endpoint.answer(call("online")), asyncio.sleep(0.5))
        return clock.now()

    assert play(main) == pytest.approx(1.6)


def test_calls_that_wait_at_the_end_are_ended() -> None:
    async def main(clock: ManualClock) -> None:
        for traffic in ("batch", "online"):
            provider = Provider(clock, once(refusal(1.9 if traffic == "online" else 300.0)))
            endpoint = endpoint_at(provider, max_concurrency=2)
            tasks = [asyncio.ensure_future(endpoint.answer(call(traffic))) for _ in range(5)]
            await asyncio.sleep(1.0)
            await endpoint.close()
            began = clock.now()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert clock.now() - began < 1.0
            assert sum(isinstance(each, EngineClosed) for each in outcomes) >= 4
            assert (endpoint._waiting_online, endpoint._held.total(), endpoint._under_way) == (0, 0, 0)

    play(main)


def test_all_models_together_have_no_more_calls_at_once_than_they_may() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda _: 1.0)
        endpoint = endpoint_at(provider, max_concurrency=4)
        ended: dict[str, list[float]] = {"a": [], "b": [], "c": []}

        async def answered(model: str) -> None:
            await endpoint.answer(call("batch", model))
            ended[model].append(clock.now())

        assert endpoint.room == 5
        await asyncio.gather(*(answered(model) for model in "abc" for _ in range(8)))
        assert provider.peak == 4
        assert clock.now() == pytest.approx(6.0, abs=0.1)
        assert max(each[0] for each in ended.values()) <= 2.0, "each model has its part from the beginning"

    play(main)


def test_all_names_of_a_model_share_its_limits() -> None:
    async def main(clock: ManualClock) -> int:
        provider = Provider(clock, lambda _: 0.1)
        endpoint = endpoint_at(provider, models={"m": "theirs", "n": "theirs"}, limits=configured_limits(rpm=60))
        unnamed = call()
        unnamed = replace(unnamed, body={name: value for name, value in unnamed.body.items() if name != "model"})
        calls = [call(model="m"), call(model="n"), call(model="./m"), unnamed]
        tasks = [asyncio.ensure_future(endpoint.answer(calls[number % 4])) for number in range(90)]
        await asyncio.sleep(59.0)
        sent = len(provider.asked_at)
        await asyncio.gather(*tasks)
        assert [*endpoint.pacing()] == ["theirs"]
        return sent

    assert 50 <= play(main) <= 60


def test_streams_teach_what_answers_do() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda _: 0.5)
        provider.stated = [StatedLimit("requests", 100, 99, 0.6)]
        endpoint = endpoint_at(provider)
        assert len([chunk async for chunk in endpoint.stream(call("online"))]) == 2
        (limit,) = endpoint.pacing()["m"].limits
        assert (limit.kind, limit.limit, limit.is_stated) == ("requests", 100.0, True)
        gate = endpoint._gates["m"]
        assert gate.pacer.expected.of(2.0, None).output_tokens == 50.0
        # What breaks in the middle is an error like any other.
        provider.breaks = EndpointError("overloaded", status=529)
        for _ in range(9):
            with pytest.raises(EndpointError, match="overloaded"):
                _ = [chunk async for chunk in endpoint.stream(call("online"))]
        assert endpoint.pacing()["m"].concurrency < 64
        assert endpoint._under_way == 0

    play(main)


def test_a_bill_to_be_paid_says_nothing_about_limits() -> None:
    async def main(clock: ManualClock) -> None:
        broke = EndpointError("pay", status=429, body={"message": "pay", "code": "insufficient_quota"})
        endpoint = endpoint_at(Provider(clock, lambda _: broke))
        await asyncio.gather(*(endpoint.answer(call()) for _ in range(10)), return_exceptions=True)
        figures = endpoint.pacing()["m"]
        assert (figures.refused, figures.found_concurrency, figures.found_per_minute) == (0, False, None)

    play(main)


def test_after_the_end_of_a_run_is_announced_no_batch_call_is_sent() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda provider: refusal(5.0) if len(provider.asked_at) == 1 else 1.0)
        endpoint = endpoint_at(provider)
        refused = asyncio.ensure_future(endpoint.answer(call()))
        await asyncio.sleep(0)
        failed = asyncio.ensure_future(endpoint.answer(call()))
        not_begun = asyncio.create_task(endpoint.answer(call()))
        endpoint.send_no_more()
        outcomes = await asyncio.gather(refused, failed, not_begun, return_exceptions=True)
        assert all(isinstance(each, EndpointDown) for each in outcomes), outcomes
        assert len(provider.asked_at) == 1
        await asyncio.sleep(5.0)
        await endpoint.answer(call("online"))

    play(main)


def test_a_batch_call_gives_up_only_after_many_refusals_and_an_online_call_after_few() -> None:
    async def main(clock: ManualClock) -> dict[Traffic, tuple[int, float]]:
        found: dict[Traffic, tuple[int, float]] = {}
        for traffic in ("online", "batch"):
            provider = Provider(clock, lambda _: refusal())
            before = clock.now()
            with pytest.raises(EndpointError, match="slow down"):
                await endpoint_at(provider).answer(call(traffic))
            found[traffic] = len(provider.asked_at), clock.now() - before
        return found

    found = play(main)
    assert {traffic: tries for traffic, (tries, _) in found.items()} == {
        traffic: each.attempts for traffic, each in RETRIES.items()
    }
    assert found["online"][1] <= 10.0
    assert found["batch"][1] >= 60.0


def test_what_is_out_of_quota_is_not_tried_again() -> None:
    async def main(clock: ManualClock) -> int:
        broke = EndpointError("pay", status=429, body={"message": "pay", "code": "insufficient_quota"})
        provider = Provider(clock, lambda _: broke)
        with pytest.raises(EndpointError, match="pay"):
            await endpoint_at(provider).answer(call())
        return len(provider.asked_at)

    assert play(main) == 1


def test_configured_limits_are_kept_and_used() -> None:
    async def main(clock: ManualClock) -> list[float]:
        provider = Provider(clock, lambda _: 1.0)
        endpoint = endpoint_at(provider, limits=configured_limits(rpm=120), max_concurrency=100)
        await asyncio.gather(*(endpoint.answer(call()) for _ in range(240)))
        return provider.asked_at

    asked_at = play(main)
    for start in asked_at:
        assert sum(start <= at < start + 60.0 for at in asked_at) <= 120
    assert asked_at[-1] <= 122.0


def test_a_number_of_requests_at_once_is_found_from_refusals() -> None:
    async def main(clock: ManualClock) -> tuple[Provider, float, EndpointInference]:
        provider = Provider(clock, lambda provider: refusal() if provider.under_way > 4 else 1.0)
        endpoint = endpoint_at(provider)
        await asyncio.gather(*(endpoint.answer(call()) for _ in range(400)))
        figures = endpoint.pacing()["m"]
        assert figures.found_concurrency
        assert figures.concurrency <= 6
        return provider, clock.now(), endpoint

    provider, seconds, _ = play(main)
    assert provider.refused <= 40
    assert seconds <= 130.0, "a hundred rounds of 4 take 100 s"


def test_calls_that_were_not_sent_are_given_back() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda _: 10.0)
        endpoint = endpoint_at(provider, max_concurrency=2)
        tasks = [asyncio.ensure_future(endpoint.answer(call())) for _ in range(5)]
        await asyncio.sleep(1.0)
        endpoint.send_no_more()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(each, EndpointDown) for each in outcomes] == [False, False, True, True, True]
        assert (len(provider.asked_at), endpoint._held.total()) == (2, 0)

    play(main)


def test_failures_of_everything_do_not_multiply_the_calls() -> None:
    """The budget of retries: 200, and two for each answer."""

    async def main(clock: ManualClock) -> int:
        provider = Provider(clock, lambda _: EndpointError("no", status=500))
        endpoint = endpoint_at(provider)
        outcomes = await asyncio.gather(*(endpoint.answer(call()) for _ in range(300)), return_exceptions=True)
        assert all(isinstance(each, EndpointError) for each in outcomes)
        return len(provider.asked_at)

    assert play(main) == 300 + 200


def test_what_headers_state_is_learned() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda _: 0.5)
        provider.stated = [StatedLimit("requests", 100, 99, 0.6), StatedLimit("tokens", 5000, 4000, 12.0)]
        endpoint = endpoint_at(provider)
        await endpoint.answer(call())
        limits = endpoint.pacing()["m"].limits
        assert [(each.kind, each.limit, each.is_stated) for each in limits] == [
            ("requests", 100.0, True),
            ("tokens", 5000.0, True),
        ]

    play(main)


def test_calls_that_wait_to_be_tried_again_leave_their_places_to_others() -> None:
    async def main(clock: ManualClock) -> None:
        provider = Provider(clock, lambda provider: EndpointError("no", status=500) if provider.fails else 1.0)
        endpoint = endpoint_at(provider, max_concurrency=4, draw=Longest())
        assert endpoint.room == 5
        provider.fails = True
        tasks = [asyncio.ensure_future(endpoint.answer(call())) for _ in range(5)]
        await asyncio.sleep(0.5)
        provider.fails = False
        assert len(provider.asked_at) == 5
        assert endpoint.room == 5
        await asyncio.sleep(1.0)
        assert (endpoint.room, endpoint._held.total(), endpoint._pausing.total()) == (0, 5, 0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (endpoint.room, endpoint._held.total(), endpoint._pausing.total()) == (5, 0, 0)

    play(main)
