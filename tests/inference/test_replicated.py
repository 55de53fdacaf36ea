"""Replicas that share calls, in virtual time: whatever dies, each call is answered once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from batchwright.clock import ManualClock
from batchwright.engine.engine_stats import EngineStats
from batchwright.errors import (
    ContextLengthExceeded,
    Crashed,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from batchwright.inference.inference import Call, WorkUnderWay, why_not_ready
from batchwright.inference.replicas.messages import Ask, decode_for_replica, decoded_error, encoded_error, frame
from batchwright.inference.replicas.replica import Replica, ReplicaDied, ReplicaFacts
from batchwright.inference.replicas.replicated import ReplicatedInference
from batchwright.request import Flow, SamplingParams, Traffic
from batchwright.testing import play

FACTS = ReplicaFacts(("fake",), ("/v1/completions",), places=4, kv_tokens=10_000, longest=1000)


class FakeReplica(Replica):
    """Answers a prompt after a second; dies of one that begins with "deadly", or when it is told to."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.held = 0
        self.starts = 0
        self.refuses: Exception | None = None
        self.closed = False
        self._dead: asyncio.Future[str] | None = None
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def is_up(self) -> bool:
        return self._dead is not None and not self._dead.done()

    async def start(self, progress: Callable[[str], None]) -> ReplicaFacts:
        await asyncio.sleep(3.0)
        if self.refuses is not None:
            raise self.refuses
        self.starts += 1
        self._stats = EngineStats(max_num_seqs=4)
        self._dead = asyncio.get_running_loop().create_future()
        return FACTS

    async def ended(self) -> ReplicaDied:
        assert self._dead is not None
        return ReplicaDied(await asyncio.shield(self._dead))

    def die(self) -> None:
        if self._dead is not None and not self._dead.done():
            self._dead.set_result("it was told to")

    async def answer(self, call: Call) -> dict[str, Any]:
        prompt = str(call.body["prompt"])
        await self._computed(prompt, call)
        return {"choices": [{"text": prompt.upper()}], "usage": {"completion_tokens": 3}}

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        prompt = str(call.body["prompt"])
        for part in (prompt, *prompt.split()[1:]):
            await self._computed(prompt, call)
            yield {"choices": [{"text": part.upper()}]}

    async def _computed(self, prompt: str, call: Call) -> None:
        assert self._dead is not None
        if self._dead.done():
            raise ReplicaDied("it is dead")
        self.begun[prompt] += 1
        self.held += 1
        self._stats.generated_tokens += 3
        try:
            if prompt.startswith("deadly"):
                asyncio.get_running_loop().call_later(0.1, self.die)
            if prompt.startswith("refused"):
                raise InvalidRequest("refused", param="prompt")
            await asyncio.wait([self._dead], timeout=1.0)
            if self._dead.done():
                raise ReplicaDied("it was told to")
        finally:
            self.held -= 1

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        return WorkUnderWay(10, 100, [(1, 5)], 2, 3, 4, 1000)

    async def close(self) -> None:
        self.closed = True


def a_call(prompt: str, traffic: Traffic = "batch", **body: Any) -> Call:
    return Call("/v1/completions", {"prompt": prompt, "max_tokens": 5, **body}, f"req_{prompt}", traffic)


async def opened(clock: ManualClock, number: int = 2) -> tuple[ReplicatedInference, list[FakeReplica]]:
    replicas = [FakeReplica() for _ in range(number)]
    return await ReplicatedInference.opened(replicas, clock=clock), replicas


def test_calls_are_shared_and_there_is_room_for_two_lines_a_place() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock)
        assert (inference.models, inference.wants) == (("fake",), 16)
        answers = [asyncio.create_task(inference.answer(a_call(f"p {number}"))) for number in range(20)]
        await asyncio.sleep(0.5)
        assert [each.held for each in replicas] == [5, 5]  # a line more than places is sent ahead
        assert inference.wants == 0
        texts = [(await each)["choices"][0]["text"] for each in answers]
        assert texts == [f"P {number}" for number in range(20)]
        assert inference.wants == 16
        work = await inference.work_of("req_")
        assert work is not None
        assert (work.steps, work.step_tokens, work.places) == (10, 200, 8)
        await inference.close()
        assert all(each.closed for each in replicas)
        with pytest.raises(EngineClosed):
            await inference.answer(a_call("late"))

    play(main)


def test_what_a_dead_replica_computed_is_answered_by_others() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock)
        lines = [asyncio.create_task(inference.answer(a_call(f"line {number}"))) for number in range(30)]
        online = [asyncio.create_task(inference.answer(a_call(f"online {n}", "online"))) for n in range(4)]
        await asyncio.sleep(0.5)
        began = clock.now()
        replicas[0].die()
        for task in online:
            await task
        assert clock.now() - began < 1.6  # at once, without a pause
        await asyncio.gather(*lines)
        assert replicas[0].starts == 2
        total = replicas[0].begun + replicas[1].begun
        assert max(total.values()) == 2
        assert inference.engine_stats is not None
        assert inference.engine_stats.generated_tokens == 3 * total.total()
        await inference.close()

    play(main)


def test_all_may_die_and_all_is_answered_when_they_are_back() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock)
        calls = [a_call(f"{n}", "online" if n % 3 else "batch") for n in range(30)]
        tasks = [asyncio.create_task(inference.answer(call)) for call in calls]
        for _ in range(2):
            await asyncio.sleep(0.5)
            for each in replicas:
                each.die()
            await asyncio.sleep(0.01)
            assert inference.wants == 0
            assert "it was told to" in str(why_not_ready(inference))
            await asyncio.sleep(10.0)
            assert why_not_ready(inference) is None
        texts = [(await task)["choices"][0]["text"] for task in tasks]
        assert texts == [str(number) for number in range(30)]
        await inference.close()

    play(main)


def test_a_line_that_kills_fails_by_name_and_no_other() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock)
        prompts = [f"line {number}" for number in range(40)] + ["deadly"]
        results = await asyncio.gather(*(inference.answer(a_call(each)) for each in prompts), return_exceptions=True)
        assert isinstance(results[-1], Crashed)
        assert "3 replicas died" in str(results[-1])
        assert all(isinstance(each, dict) for each in results[:-1])
        assert sum(each.begun["deadly"] for each in replicas) == 3
        online = await asyncio.gather(inference.answer(a_call("deadly", "online")), return_exceptions=True)
        assert isinstance(online[0], Crashed)
        await inference.close()

    play(main)


def test_a_stream_goes_elsewhere_only_before_its_first_token() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock)

        async def read(prompt: str) -> list[str]:
            return [body["choices"][0]["text"] async for body in inference.stream(a_call(prompt, "online"))]

        early = asyncio.create_task(read("a b c"))
        await asyncio.sleep(0.5)
        next(each for each in replicas if each.held).die()
        assert await early == ["A B C", "B", "C"]
        late = asyncio.create_task(read("d e f"))
        await asyncio.sleep(1.5)
        next(each for each in replicas if each.held).die()
        with pytest.raises(EngineClosed, match="part of the answer was sent"):
            await late
        assert await read("g h") == ["G H", "H"]
        await inference.close()

    play(main)


def test_errors_cancelling_and_deadlines() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock, 1)
        with pytest.raises(InvalidRequest, match="refused"):
            await inference.answer(a_call("refused"))
        tasks = [asyncio.create_task(inference.answer(a_call(f"{number}"))) for number in range(12)]
        late = asyncio.create_task(inference.answer(a_call("late", deadline_ms=500)))
        await asyncio.sleep(0.6)
        with pytest.raises(DeadlineExceeded, match="place"):
            await late
        for task in tasks[:6]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert inference.wants == 8
        assert "late" not in replicas[0].begun
        await inference.close()

    play(main)


def test_a_replica_that_cannot_be_started_is_tried_again_and_the_first_time_that_is_an_error() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock, 1)
        replicas[0].refuses = ModelNotFound("gone")
        replicas[0].die()
        waiting = asyncio.create_task(inference.answer(a_call("a")))
        await asyncio.sleep(100.0)
        assert why_not_ready(inference) == "no replica is up: gone"
        replicas[0].refuses = None
        assert (await waiting)["choices"][0]["text"] == "A"
        await inference.close()
        broken = [FakeReplica(), FakeReplica()]
        broken[1].refuses = ModelNotFound("gone")
        with pytest.raises(ModelNotFound):
            await ReplicatedInference.opened(broken, clock=clock)
        assert all(each.closed for each in broken)

    play(main)


def test_closing_answers_what_waits() -> None:
    async def main(clock: ManualClock) -> None:
        inference, _ = await opened(clock, 1)
        tasks = [asyncio.create_task(inference.answer(a_call(f"{number}"))) for number in range(10)]
        await asyncio.sleep(0.5)
        await inference.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, (dict, EngineClosed)) for each in results)

    play(main)


def test_calls_and_errors_are_the_same_on_the_other_side() -> None:
    params = SamplingParams(max_tokens=3, stop=("x",), logit_bias={5: 1.0})
    body = {"prompt": "é \ud800", "seed": 2**70, "temperature": 0.5}
    call = Call("/v1/completions", body, "req_1", "online", 2.5, flow=Flow("a", "b", 2.0), defaults=params)
    sent = decode_for_replica(frame(Ask.of(7, call, stream=True))[4:])
    assert isinstance(sent, Ask)
    assert sent.call() == call
    named = Call("/v1/completions", {}, "req_2", "batch", defaults={"max_tokens": 4})
    assert Ask.of(1, named, stream=False).call() == named
    for error in (
        InvalidRequest("no", param="n", code="wrong"),
        ContextLengthExceeded("long"),
        Overloaded("full", retry_after=2.0),
        DeadlineExceeded("late", predicted_ms=3.0),
        ModelNotFound("none"),
    ):
        back = decoded_error(encoded_error(error))
        assert type(back) is type(error)
        assert (str(back), vars(back)) == (str(error), vars(error))
    other = decoded_error(encoded_error(KeyError("x")))
    assert isinstance(other, RuntimeError)
    assert str(other) == "KeyError: 'x'"
