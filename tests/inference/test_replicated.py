"""Replicas that share calls, in virtual time: whatever dies, each call is answered once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
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
from batchwright.inference.replicas import messaged_replica
from batchwright.inference.replicas.messaged_replica import Connection, MessagedReplica
from batchwright.inference.replicas.messages import (
    Answered,
    Ask,
    Beat,
    Chunk,
    FromReplica,
    Ready,
    ToReplica,
    decode_for_replica,
    decoded_error,
    encoded_error,
    encoded_figures,
    frame,
)
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
        self.starts_in = 3.0
        self.closed = False
        self.dies_when_closed = False
        self._dead: asyncio.Future[ReplicaDied] | None = None
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def is_up(self) -> bool:
        return self._dead is not None and not self._dead.done()

    async def start(self, progress: Callable[[str], None]) -> ReplicaFacts:
        progress("waiting for a node")
        await asyncio.sleep(self.starts_in)
        if self.refuses is not None:
            raise self.refuses
        self.starts += 1
        self._stats = EngineStats(max_num_seqs=4)
        self._dead = asyncio.get_running_loop().create_future()
        return FACTS

    async def ended(self) -> ReplicaDied:
        assert self._dead is not None
        return await asyncio.shield(self._dead)

    def die(self, *, by_node: bool = False) -> None:
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(ReplicaDied("it was told to", by_node=by_node))

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
                raise ReplicaDied("it was told to", by_node=self._dead.result().by_node)
        finally:
            self.held -= 1

    async def work_of(self, prefix: str) -> WorkUnderWay | None:
        return WorkUnderWay(10, 100, [(1, 5)], 2, 3, 4, 1000)

    async def close(self) -> None:
        self.closed = True
        if self.dies_when_closed:
            self.die()


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


@pytest.mark.parametrize("error", [ModelNotFound("gone"), RuntimeError("gone")])
def test_a_replica_that_cannot_be_started_is_tried_again_and_the_first_time_that_is_an_error(error: Exception) -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock, 1)
        replicas[0].refuses = error
        replicas[0].die()
        waiting = asyncio.create_task(inference.answer(a_call("a")))
        await asyncio.sleep(100.0)
        assert why_not_ready(inference) == "no replica is up: gone"
        replicas[0].refuses = None
        assert (await waiting)["choices"][0]["text"] == "A"
        await inference.close()
        broken = [FakeReplica(), FakeReplica()]
        broken[1].refuses = error
        with pytest.raises(type(error), match="gone"):
            await ReplicatedInference.opened(broken, clock=clock)
        assert all(each.closed for each in broken)

    play(main)


def test_those_that_are_up_compute_while_others_wait_for_a_machine() -> None:
    async def main(clock: ManualClock) -> None:
        replicas, told = [FakeReplica() for _ in range(3)], list[str]()
        replicas[0].starts_in, replicas[2].starts_in = 1000.0, 2000.0
        inference = await ReplicatedInference.opened_by_first(replicas, told.append, clock=clock)
        assert clock.now() < 10.0
        assert set(told) == {"waiting for a node"}
        assert inference.standing == "2 of 3 replicas are not up: waiting for a node"
        assert (inference.wants, why_not_ready(inference)) == (8, None)
        assert (await inference.answer(a_call("a")))["choices"][0]["text"] == "A"
        await asyncio.sleep(1500.0)
        assert (inference.wants, [each.starts for each in replicas]) == (16, [1, 1, 0])
        closing = asyncio.create_task(inference.close())  # in the middle of a start
        await closing
        assert all(each.closed for each in replicas)

    play(main)


@pytest.mark.parametrize(
    ("refuses", "raised", "said"),
    [
        (ModelNotFound("gone"), ModelNotFound, "gone"),
        (
            ReplicaDied("no memory"),
            EngineClosed,
            "3 replicas died while they loaded the model; the last one: no memory",
        ),
    ],
)
def test_no_replica_at_all_is_an_error_soon(refuses: Exception, raised: type[Exception], said: str) -> None:
    async def main(clock: ManualClock) -> None:
        replicas, closed = [FakeReplica() for _ in range(2)], list[float]()
        for each in replicas:
            each.refuses = refuses

        async def close() -> None:
            closed.append(clock.now())

        with pytest.raises(raised, match=said):
            await ReplicatedInference.opened_by_first(replicas, clock=clock, closed=close)
        assert clock.now() < 60.0
        assert len(closed) == 1

    play(main)


def test_a_machine_that_goes_before_the_first_is_up_is_waited_for() -> None:
    async def main(clock: ManualClock) -> None:
        replica = FakeReplica()
        replica.refuses = ReplicaDied("its node cannot be reached", by_node=True)
        opening = asyncio.create_task(ReplicatedInference.opened_by_first([replica], clock=clock))
        await asyncio.sleep(600.0)
        assert not opening.done()
        replica.refuses = None
        inference = await opening
        assert inference.standing is None
        await inference.close()

    play(main)


def test_lines_are_not_suspected_of_machines_that_go_unless_it_is_again_and_again() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock)
        tasks = [asyncio.create_task(inference.answer(a_call(f"{number}"))) for number in range(20)]
        for _ in range(8):
            await asyncio.sleep(0.5)
            for each in replicas:
                each.die(by_node=True)
            await asyncio.sleep(0.01)
            while not any(each.held for each in replicas):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            # Side by side as before, not one after another.
            assert max(each.held for each in replicas) > 1
        texts = [(await task)["choices"][0]["text"] for task in tasks]
        assert texts == [str(number) for number in range(20)]

        line = asyncio.create_task(inference.answer(a_call("fatal")))
        while not line.done():
            await asyncio.sleep(0.1)
            for each in replicas:
                if each.held:
                    each.die(by_node=True)
        with pytest.raises(Crashed):
            await line
        await inference.close()

    play(main)


class LoopConnection(Connection):
    """A connection whose other side is the test."""

    def __init__(self) -> None:
        self.sent: list[ToReplica] = []
        self.told: asyncio.Queue[FromReplica | None] = asyncio.Queue()
        self.ends_in = 0.0

    def send(self, message: ToReplica) -> None:
        self.sent.append(message)

    async def receive(self) -> FromReplica:
        message = await self.told.get()
        if message is None:
            raise ConnectionError("gone")
        return message

    def kill(self) -> None:
        self.told.put_nowait(None)

    async def end(self) -> ReplicaDied:
        await asyncio.sleep(self.ends_in)
        return ReplicaDied("its node cannot be reached", by_node=True)


class LoopReplica(MessagedReplica):
    def __init__(self) -> None:
        super().__init__()
        self.lives: list[LoopConnection] = []

    async def _connect(self, progress: Callable[[str], None]) -> Connection:
        self.lives.append(LoopConnection())
        self.lives[-1].told.put_nowait(Ready(FACTS))
        return self.lives[-1]


def test_an_answer_of_a_life_that_was_given_up_is_nobodys() -> None:
    async def main(clock: ManualClock) -> None:
        replica = LoopReplica()
        inference = await ReplicatedInference.opened_by_first([replica], clock=clock)
        line = asyncio.create_task(inference.answer(a_call("a")))
        await asyncio.sleep(1.0)
        first = replica.lives[0]
        first.told.put_nowait(None)
        await asyncio.sleep(10.0)
        assert len(replica.lives) == 2
        [lease] = [each for each in replica.lives[1].sent if isinstance(each, Ask)]
        [given_up] = [each for each in first.sent if isinstance(each, Ask)]
        assert lease.id != given_up.id
        first.told.put_nowait(Answered(given_up.id, {"from": "the life that came back"}))
        replica.lives[1].told.put_nowait(Answered(given_up.id, {"from": "a mistaken life"}))
        await asyncio.sleep(1.0)
        assert not line.done()
        replica.lives[1].told.put_nowait(Answered(lease.id, {"from": "its lease"}))
        assert await line == {"from": "its lease"}
        replica.lives[1].told.put_nowait(None)
        await inference.close()

    play(main)


def test_a_replica_whose_answer_is_read_slowly_is_not_taken_for_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(clock: ManualClock) -> None:
        monkeypatch.setattr(messaged_replica, "time", SimpleNamespace(monotonic=clock.now))
        replica = LoopReplica()
        inference = await ReplicatedInference.opened_by_first([replica], clock=clock)

        async def beat(seconds: int) -> None:
            for _ in range(seconds):
                replica.lives[-1].told.put_nowait(Beat(encoded_figures(EngineStats(steps=7))))
                await asyncio.sleep(1.0)

        bodies = inference.stream(a_call("a b", "online"))
        first = asyncio.ensure_future(anext(bodies))
        await beat(1)
        [call] = [each for each in replica.lives[0].sent if isinstance(each, Ask)]
        for body in ({"part": 1}, {"part": 2}, None):
            replica.lives[0].told.put_nowait(Chunk(call.id, body))
        assert await first == {"part": 1}
        await beat(2 * int(messaged_replica.PATIENCE))
        assert len(replica.lives) == 1
        assert [body async for body in bodies] == [{"part": 2}]

        line = asyncio.create_task(inference.answer(a_call("c")))
        await beat(int(messaged_replica.PATIENCE) + 9)
        assert len(replica.lives) == 2
        line.cancel()
        await inference.close()

    play(main)


def test_a_call_that_comes_while_a_replica_dies_does_not_hide_why() -> None:
    async def main(clock: ManualClock) -> None:
        replica = LoopReplica()
        inference = await ReplicatedInference.opened_by_first([replica], clock=clock)
        calls = [asyncio.create_task(inference.answer(a_call("a", "online")))]
        for _ in range(5):
            await asyncio.sleep(1.0)
            replica.lives[-1].ends_in = 5.0
            replica.lives[-1].told.put_nowait(None)
            await asyncio.sleep(1.0)
            calls.append(asyncio.create_task(inference.answer(a_call("b", "online"))))
            await asyncio.sleep(4.1)
            assert inference.standing == "1 of 1 replicas are not up: its node cannot be reached"
            await asyncio.sleep(60.0)
        for _ in range(3):
            for each in replica.lives[-1].sent:
                if isinstance(each, Ask):
                    replica.lives[-1].told.put_nowait(Answered(each.id, {"from": "the last life"}))
            await asyncio.sleep(1.0)
        # The calls are not to blame for the nodes.
        assert await asyncio.gather(*calls) == 6 * [{"from": "the last life"}]
        replica.lives[-1].told.put_nowait(None)
        await inference.close()

    play(main)


def test_a_call_with_a_deadline_does_not_wait_longer_for_a_replica_that_dies_slowly() -> None:
    async def main(clock: ManualClock) -> None:
        replica = LoopReplica()
        inference = await ReplicatedInference.opened_by_first([replica], clock=clock)
        replica.lives[0].ends_in = 9.0
        replica.lives[0].told.put_nowait(None)
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(DeadlineExceeded, match="while its replica was ending"):
            await inference.answer(a_call("a", "online", deadline_ms=2000))
        assert loop.time() - began == pytest.approx(2.0)
        await asyncio.sleep(60.0)
        replica.lives[-1].told.put_nowait(None)
        await inference.close()

    play(main)


def test_a_slow_reader_of_a_stream_that_broke_off_does_not_take_out_the_next_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(clock: ManualClock) -> None:
        monkeypatch.setattr(messaged_replica, "time", SimpleNamespace(monotonic=clock.now))
        replica = LoopReplica()
        inference = await ReplicatedInference.opened_by_first([replica], clock=clock)
        bodies = inference.stream(a_call("a b", "online"))
        first = asyncio.ensure_future(anext(bodies))
        await asyncio.sleep(1.0)
        [call] = [each for each in replica.lives[0].sent if isinstance(each, Ask)]
        replica.lives[0].told.put_nowait(Chunk(call.id, {"part": 1}))
        assert await first == {"part": 1}
        replica.lives[0].told.put_nowait(None)
        await asyncio.sleep(60.0)
        assert len(replica.lives) == 2
        for _ in range(2 * int(messaged_replica.PATIENCE)):
            replica.lives[-1].told.put_nowait(Beat(encoded_figures(EngineStats(steps=7))))
            await asyncio.sleep(1.0)
        assert len(replica.lives) == 2
        with pytest.raises(EngineClosed, match="part of the answer was sent"):
            await anext(bodies)
        assert inference.why_not_ready is None
        replica.lives[1].told.put_nowait(None)
        await inference.close()

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


def test_a_call_whose_replica_ends_with_the_others_ends_too() -> None:
    async def main(clock: ManualClock) -> None:
        inference, replicas = await opened(clock, 1)
        answers = [asyncio.create_task(inference.answer(a_call("a"))), asyncio.create_task(_all_of(inference, "b c d"))]
        await asyncio.sleep(0.5)
        replicas[0].dies_when_closed = True
        await inference.close()
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert [type(each) for each in results] == [EngineClosed, EngineClosed]

    play(main)


async def _all_of(inference: ReplicatedInference, prompt: str) -> list[dict[str, Any]]:
    return [body async for body in inference.stream(a_call(prompt))]


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
