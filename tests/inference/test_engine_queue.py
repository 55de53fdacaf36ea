"""When an engine is asked for its queue, and when it is left alone: in virtual time, and over real connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from batchwright.clock import ManualClock
from batchwright.errors import EndpointError, EndpointUnreachable, EngineClosed
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.engine_queue import EngineQueueWatch
from batchwright.inference.inference import Call
from batchwright.testing import play
from batchwright.wire.engine_gauges import Queue

from .running import in_real_time, until
from .scripted import Reply, Request, ScriptedServer

METRICS = "vllm:num_requests_running 3\nvllm:num_requests_waiting 5\n"


@dataclass
class Engine:
    """Shows what `answer` gives or raises."""

    clock: ManualClock
    answer: Callable[[], Awaitable[str]]
    busy: bool = True
    under_way: int = 1
    slots: Callable[[], Awaitable[str]] | None = None
    asked_at: list[float] = field(default_factory=list)
    learned: list[Queue] = field(default_factory=list)

    def watch(self) -> EngineQueueWatch:
        return EngineQueueWatch(self.read, lambda: self.under_way * self.busy, self.learned.append)

    async def read(self, path: str) -> str:
        if path == "/props":
            if self.slots is None:
                raise EndpointError("nothing is there", status=404)
            return await self.slots()
        self.asked_at.append(self.clock.now())
        return await self.answer()


async def shows() -> str:
    return METRICS


def raising(error: Exception) -> Callable[[], Awaitable[str]]:
    async def raises() -> str:
        raise error

    return raises


def test_it_is_asked_twice_a_second_while_there_are_calls() -> None:
    async def main(clock: ManualClock) -> None:
        engine = Engine(clock, shows)
        watch = engine.watch()
        for _ in range(50):
            watch.wake()
        await asyncio.sleep(2.2)
        engine.busy = False
        await asyncio.sleep(5.0)
        assert engine.asked_at == [0.0, 0.5, 1.0, 1.5, 2.0]
        assert engine.learned == [Queue(3, 5)] * 5
        # A client with one short call after the other does not make it more often.
        engine.busy = True
        watch.wake()
        await asyncio.sleep(0.1)
        engine.busy = False
        watch.wake()
        await asyncio.sleep(1.0)
        assert engine.asked_at[5:] == [pytest.approx(7.2)]

    play(main)


@pytest.mark.parametrize(
    "error",
    [
        EndpointError("no", status=404),
        EndpointUnreachable("slow", timed_out=True),
        EngineClosed("closed"),
        ValueError("a defect"),
        OSError("a cable"),
    ],
)
def test_one_that_shows_nothing_is_left_alone_soon(error: Exception) -> None:
    async def main(clock: ManualClock) -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        engine = Engine(clock, raising(error))
        watch = engine.watch()
        for _ in range(20):
            watch.wake()
            await asyncio.sleep(1.0)
        assert len(engine.asked_at) == 3
        assert not problems

    play(main)


def test_an_engine_without_metrics_is_asked_for_its_slots_once() -> None:
    async def main(clock: ManualClock) -> None:
        async def properties() -> str:
            return '{"total_slots": 8, "model_path": "a.gguf"}'

        engine = Engine(clock, raising(EndpointError("start it with --metrics", status=501)), slots=properties)
        engine.under_way = 5
        watch = engine.watch()
        watch.wake()
        await asyncio.sleep(0.6)
        engine.under_way = 20
        await asyncio.sleep(0.5)
        assert engine.learned == [Queue(5, 0), Queue(5, 0), Queue(8, 12)]
        assert len(engine.asked_at) == 1
        await watch.close()

    play(main)


def test_figures_that_take_long_are_given_up() -> None:
    async def main(clock: ManualClock) -> None:
        async def hangs() -> str:
            await asyncio.sleep(1e6)
            return METRICS

        engine = Engine(clock, hangs)
        engine.watch().wake()
        await asyncio.sleep(100.0)
        assert len(engine.asked_at) == 3
        assert engine.asked_at[-1] < 20.0

    play(main)


def test_one_that_is_restarted_is_asked_when_it_is_back() -> None:
    async def main(clock: ManualClock) -> None:
        engine = Engine(clock, raising(EndpointUnreachable("gone")))
        watch = engine.watch()
        watch.wake()
        await asyncio.sleep(30.0)
        engine.answer = shows
        await asyncio.sleep(1.0)
        assert engine.learned
        await watch.close()

    play(main)


def test_a_watch_that_is_closed_asks_no_more() -> None:
    async def main(clock: ManualClock) -> None:
        for before in (0.0, 0.2):
            engine = Engine(clock, shows)
            watch = engine.watch()
            watch.wake()
            await asyncio.sleep(before)
            await watch.close()
            asked = len(engine.asked_at)
            watch.wake()
            await asyncio.sleep(5.0)
            assert len(engine.asked_at) == asked
            await watch.close()
        assert len(asyncio.all_tasks()) == 1

    play(main)


@in_real_time
async def test_the_queue_of_an_engine_is_read_beside_its_api(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    leave = asyncio.Event()

    async def wait(request: Request) -> Reply:
        await leave.wait()
        return Reply()

    async with ScriptedServer(*[wait] * 64) as server:
        server.metrics = Reply(content=b"vllm:num_requests_running 16\nvllm:num_requests_waiting 0\n")
        endpoint = EndpointInference(server.url, "key", first_concurrency=16)
        calls = [Call("/v1/completions", {"model": "m", "prompt": "x"}, "r", "batch") for _ in range(64)]
        tasks = [asyncio.ensure_future(endpoint.answer(call)) for call in calls]
        # Nothing waits in the engine, so it gets more than it was given to begin with, before any answer has come.
        await until(lambda: server.inside >= 40)
        leave.set()
        await asyncio.gather(*tasks)
        assert server.asked_for_metrics >= 1
        await endpoint.close()


@in_real_time
async def test_a_provider_is_never_asked_for_metrics() -> None:
    for address, asked in (("https://api.openai.com/v1", False), ("https://x.groq.com/v1", True)):
        endpoint = EndpointInference(address, "key")
        assert endpoint._shows_queue is asked
        await endpoint.close()
