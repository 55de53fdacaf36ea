"""When calls to an endpoint are let in, and in which order: in virtual time, with every way to leave a gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchwright.clock import ManualClock
from batchwright.errors import EndpointDown, EndpointError, EndpointUnreachable
from batchwright.inference.endpoint_gate import Gate, Turn, usage_of
from batchwright.pacing.attempt import Attempt
from batchwright.pacing.limits import ConfiguredLimit, Use
from batchwright.pacing.pacer import Pacer
from batchwright.request import Traffic
from batchwright.testing import VirtualLoop, play
from batchwright.wire.rate_limits import StatedLimit

USE = Use(10.0, 20.0)
DOWN = EndpointDown("stopping")


def in_virtual_time(test: Callable[[ManualClock], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def played() -> None:
        play(test)

    played.__name__, played.__doc__ = test.__name__, test.__doc__
    return played


def gate_of(places: int, *told: ConfiguredLimit, most: int = 64) -> Gate:
    """A gate with so many places to begin with."""
    return Gate(Pacer(most, told, first=places))


@in_virtual_time
async def test_who_is_cancelled_at_the_gate_leaves_no_trace(clock: ManualClock) -> None:
    gate = gate_of(1, most=1)
    entered: list[str] = []

    async def enter(name: str, leave: asyncio.Event) -> None:
        async with gate.enter(USE, "online"):
            entered.append(name)
            await leave.wait()

    leave = asyncio.Event()
    first, second, third = (asyncio.ensure_future(enter(name, leave)) for name in "abc")
    await asyncio.sleep(0)
    second.cancel()
    first.cancel()
    leave.set()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert entered == ["a", "c"]
    # Cancelled in the very moment in which it is let in.
    async with gate.enter(USE, "batch"):
        late = asyncio.ensure_future(enter("d", leave))
        await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (gate.inside, gate.waiting_online, gate.pacer.under_way, entered) == (0, 0, 0, ["a", "c"])


@in_virtual_time
async def test_a_call_is_under_way_once_it_goes_on(clock: ManualClock) -> None:
    gate = gate_of(1, most=1)
    counted: list[tuple[int, int]] = []

    def count() -> None:
        figures = gate.figures(clock.now())
        counted.append((figures.sent, figures.under_way))

    async def enter(*, cancels: bool) -> None:
        async with gate.enter(USE, "online"):
            count()
        if cancels:
            cancelled.cancel()  # it was let in just now, and never goes on

    async with gate.enter(USE, "online"):
        following = asyncio.ensure_future(enter(cancels=True))
        cancelled = asyncio.ensure_future(enter(cancels=False))
        await asyncio.sleep(0)
    count()
    await asyncio.gather(following, cancelled, return_exceptions=True)
    count()
    assert counted == [(1, 0), (2, 1), (2, 0)]
    assert (gate.inside, gate.pacer.under_way) == (0, 0)


@in_virtual_time
async def test_places_follow_priorities_and_weights(clock: ManualClock) -> None:
    gate = gate_of(1)
    entered: list[str] = []
    calls = [("a", 1.0, 5), ("a", 1.0, 5), ("b", 2.0, 5), ("b", 2.0, 5), ("b", 2.0, 5), ("a", 1.0, 0)]
    leave = asyncio.Event()

    async def enter(owner: str, weight: float, priority: int) -> None:
        async with gate.enter(USE, "online", owner, weight=weight, priority=priority):
            entered.append(f"{owner}{priority}")
            await leave.wait()

    async with gate.enter(USE, "online"):
        tasks = [asyncio.ensure_future(enter(*call)) for call in calls]
        await asyncio.sleep(0)
        gate.pacer.search.raise_to(5)
    await asyncio.sleep(0)
    # The urgent one; then b, twice as heavy, has two for each of a.
    assert entered == ["a0", "b5", "b5", "a5", "b5"]
    leave.set()
    await asyncio.gather(*tasks)
    assert (gate.inside, gate.waiting_online, gate._owners) == (0, 0, {})


@in_virtual_time
async def test_the_next_place_is_for_the_owner_with_the_fewest(clock: ManualClock) -> None:
    gate = gate_of(2, most=2)
    entered: list[str] = []
    leaves = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1", "c1")}

    async def enter(name: str) -> None:
        async with gate.enter(USE, "online", name[0]):
            entered.append(name)
            await leaves[name].wait()

    tasks = [asyncio.ensure_future(enter(name)) for name in leaves]
    await asyncio.sleep(0)
    assert (entered, gate.waiting_online) == (["a1", "a2"], 4)
    for name in ("a1", "a2", "b1", "a3", "c1", "a4"):
        leaves[name].set()
        for _ in range(4):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert entered == ["a1", "a2", "b1", "a3", "c1", "a4"]
    assert (gate.inside, gate.waiting_online) == (0, 0)


@in_virtual_time
async def test_calls_are_let_in_at_the_pace_of_a_told_limit(clock: ManualClock) -> None:
    gate = gate_of(64, ConfiguredLimit("requests", 60.0))
    entered: list[float] = []

    async def enter() -> None:
        async with gate.enter(USE, "batch") as turn:
            entered.append(clock.now())
            turn.answered({"input": 10, "output": 20})

    await asyncio.gather(*(enter() for _ in range(10)))
    # A second each, and a little more in case they arrive less evenly than they were sent.
    assert entered == pytest.approx([1.005 * number for number in range(10)], abs=0.1)


@in_virtual_time
async def test_a_refusal_holds_all_calls_for_as_long_as_it_says(clock: ManualClock) -> None:
    gate = gate_of(4)
    entered: list[float] = []

    async def enter(error: EndpointError | None) -> None:
        async with gate.enter(USE, "online") as turn:
            entered.append(clock.now())
            if error is not None:
                turn.failed(error)

    await enter(EndpointError("slow down", status=429, retry_after=7.0))
    await asyncio.gather(enter(None), enter(None))
    assert entered[0] == 0.0
    assert entered[1] == pytest.approx(7.0)
    # Whatever it says, the endpoint is tried again some day.
    for told in (1e5, float("inf")):
        gate = gate_of(4)
        before = clock.now()
        await enter(EndpointError("slow down", status=429, retry_after=told))
        await enter(None)
        assert clock.now() - before == pytest.approx(600.0)


@in_virtual_time
async def test_who_waits_behind_a_call_that_is_cancelled_does_not_wait_for_its_sake(clock: ManualClock) -> None:
    gate = gate_of(8, ConfiguredLimit("tokens", 1000.0))
    entered: list[float] = []

    async def enter(tokens: float) -> None:
        async with gate.enter(Use(tokens, 0.0), "batch"):
            entered.append(clock.now())

    await enter(100.0)
    await asyncio.sleep(10.0)
    large, small = (asyncio.ensure_future(enter(tokens)) for tokens in (1000.0, 10.0))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()
    large.cancel()
    await small
    assert entered == [0.0, 10.0]


@in_virtual_time
async def test_only_what_was_sent_is_given_up(clock: ManualClock) -> None:
    gate = gate_of(1, most=1)

    async def enter(*, is_sent: bool) -> None:
        async with gate.enter(USE, "batch") as turn:
            if not is_sent:
                turn.withdraw()
            await asyncio.sleep(1.0)

    for is_sent, given_up in ((True, 1), (False, 1)):
        inside, waiting = (asyncio.ensure_future(enter(is_sent=is_sent)) for _ in range(2))
        await asyncio.sleep(0.5)
        waiting.cancel()
        inside.cancel()
        await asyncio.gather(inside, waiting, return_exceptions=True)
        assert gate.pacer.figures(clock.now()).given_up == given_up


@in_virtual_time
async def test_batch_calls_that_wait_are_given_back(clock: ManualClock) -> None:
    gate = gate_of(1, most=1)
    entered: list[str] = []

    async def enter(name: str, traffic: Traffic) -> None:
        async with gate.enter(USE, traffic):
            entered.append(name)
            await asyncio.sleep(1.0)

    names: list[tuple[str, Traffic]] = [("inside", "batch"), ("one", "batch"), ("online", "online"), ("two", "batch")]
    tasks = [asyncio.ensure_future(enter(*each)) for each in names]
    await asyncio.sleep(0.5)
    gate.refuse_waiting(DOWN)
    gate.refuse_waiting(DOWN)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes == [None, DOWN, None, DOWN]
    assert entered == ["inside", "online"]
    assert (gate.inside, gate.waiting_online, gate.pacer.under_way, gate._owners) == (0, 0, 0, {})
    await enter("later", "batch")


@pytest.mark.parametrize(
    ("error", "refused", "overloaded"),
    [
        (EndpointError("x", status=429), 1, 0),
        (EndpointError("x", status=408), 0, 1),
        (EndpointError("x", status=503), 0, 1),
        (EndpointError("x", status=529), 0, 1),
        (EndpointError("x", status=500), 0, 0),
        (EndpointError("x", status=400), 0, 0),
        (EndpointUnreachable("x"), 0, 0),
    ],
)
def test_what_is_learned_from_an_error(error: EndpointError, refused: int, overloaded: int) -> None:
    async def main(_: ManualClock) -> Recorder:
        gate = Gate(Recorder(8))
        async with gate.enter(USE, "online") as turn:
            turn.failed(error)
            turn.failed(error)
            turn.answered(None)
        assert isinstance(gate.pacer, Recorder)
        return gate.pacer

    pacer = play(main)
    assert (pacer.outcomes.count("refused"), pacer.outcomes.count("overloaded")) == (refused, overloaded)
    assert len(pacer.outcomes) == 1


def test_a_try_that_took_too_long_is_overload() -> None:
    test_what_is_learned_from_an_error(EndpointUnreachable("x", timed_out=True), 0, 1)


def test_a_refusal_states_limits_in_its_head_and_hints_at_a_rate_in_its_text() -> None:
    text = "Rate limit reached on requests per min (RPM): Limit 600, Used 600, Requested 1."

    async def main(clock: ManualClock) -> None:
        for stated in ((), (StatedLimit("tokens", 20_000, 0, 5.0),)):
            gate = gate_of(8)
            async with gate.enter(USE, "online") as turn:
                turn.heard(stated)
                turn.failed(EndpointError("x", status=429, body={"message": text}))
            figures = gate.pacer.figures(asyncio.get_running_loop().time())
            assert [(limit.kind, limit.limit) for limit in figures.limits] == [(s.kind, s.limit) for s in stated]
            assert gate.pacer.is_rate_known
            assert not figures.found_concurrency

    play(main)


@pytest.mark.parametrize(
    "body",
    [
        {"message": "Request too large for m on tokens per min (TPM): Limit 30000, Requested 40000."},
        {"code": "insufficient_quota", "message": "You exceeded your current quota of tokens per minute."},
    ],
)
def test_a_request_that_is_refused_whatever_else_is_sent_teaches_nothing(body: dict[str, object]) -> None:
    async def main(clock: ManualClock) -> None:
        gate = gate_of(8, ConfiguredLimit("tokens", 30_000))
        async with gate.enter(Use(39_000.0, 1000.0), "batch") as turn:
            turn.failed(EndpointError("x", status=429, body=body))
        figures = gate.pacer.figures(asyncio.get_running_loop().time())
        assert (figures.refused, figures.found_concurrency, figures.blocked_seconds) == (0, False, 0.0)
        assert figures.limits[0].left == 30_000.0
        assert figures.found_per_minute is None

    play(main)


def test_one_that_is_refused_at_random_waits_alone() -> None:
    async def main(clock: ManualClock) -> None:
        gate = gate_of(8, ConfiguredLimit("requests", 600))
        waits = []
        for pause in (2.0, 2.0, 20.0):
            async with gate.enter(USE, "batch") as turn:
                error = EndpointError("x", status=429, retry_after=pause)
                turn.failed(error)
            waits.append((error.waits_alone, gate.pacer.blocked(asyncio.get_running_loop().time())))
            await asyncio.sleep(1.0)
        assert waits == [(True, 0.0), (True, 0.0), (False, 20.0)], "a long pause is that of all"

    play(main)


def test_usage_that_rises_too_fast_is_refused_with_another_status_too() -> None:
    async def main(clock: ManualClock) -> None:
        gate = gate_of(8)
        async with gate.enter(USE, "batch") as turn:
            turn.failed(EndpointError("x", status=503, body={"code": "slow_down", "message": "x"}, retry_after=3.0))
        assert gate.pacer.blocked(asyncio.get_running_loop().time()) == pytest.approx(3.0)
        assert gate.pacer.figures(asyncio.get_running_loop().time()).refused == 1

    play(main)


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, {"input": 3, "output": 4}),
        ({"usage": {"input_tokens": 3, "output_tokens": 4}}, {"input": 3, "output": 4}),
        ({"usage": {"prompt_tokens": 3}}, {"input": 3, "output": 0}),
        ({"usage": {"completion_tokens": 3}}, None),
        ({"usage": {"prompt_tokens": "3", "completion_tokens": 4}}, None),
        ({"usage": {"prompt_tokens": 10**400, "completion_tokens": 4}}, None),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": -1}}, None),
        ({"usage": {"prompt_tokens": True, "completion_tokens": 4}}, None),
        ({"usage": None}, None),
        ({"usage": [3]}, None),
        ({}, None),
    ],
)
def test_usage(answer: dict[str, Any], usage: dict[str, int] | None) -> None:
    assert usage_of(answer) == usage


Outcome = Literal["answered", "refused", "overloaded", "failed", "nothing", "raises"]


class Recorder(Pacer):
    """Counts what becomes of each attempt."""

    def __init__(self, most: int, told: Sequence[ConfiguredLimit] = ()) -> None:
        super().__init__(most, told, first=most)
        self.attempts: list[Attempt] = []
        self.outcomes: list[str] = []

    def begin(self, use: Use, now: float) -> Attempt:
        assert self.under_way < self.concurrency
        assert self.wait(use, now, is_urgent=True) <= 1e-4
        self.attempts.append(super().begin(use, now))
        return self.attempts[-1]

    def succeeded(self, attempt: Attempt, now: float, **rest: Any) -> None:
        self.outcomes.append("answered")
        super().succeeded(attempt, now, **rest)

    def refused(self, attempt: Attempt, now: float, **rest: Any) -> bool:
        self.outcomes.append("refused")
        return super().refused(attempt, now, **rest)

    def overloaded(self, attempt: Attempt, now: float, retry_after: float | None = None) -> None:
        self.outcomes.append("overloaded")
        super().overloaded(attempt, now, retry_after)

    def failed(self, attempt: Attempt) -> None:
        self.outcomes.append("failed")
        super().failed(attempt)


@dataclass(eq=False)
class Caller:
    """One that wants in, stays until it is told how to leave, and leaves."""

    traffic: Traffic
    leaves: asyncio.Future[Outcome]
    state: Literal["waiting", "inside", "gone"] = "waiting"
    turn: Turn | None = None
    entered_at: float = 0.0
    task: asyncio.Task[None] = field(init=False)


class GateMachine(RuleBasedStateMachine):
    """Callers come, leave, are cancelled and refused, in any order, between any two steps of the event loop."""

    @initialize(most=st.integers(1, 5), limit=st.sampled_from([None, 30.0, 600.0]))
    def begin(self, most: int, limit: float | None) -> None:
        self.loop = VirtualLoop()
        told = [] if limit is None else [ConfiguredLimit("requests", limit)]
        self.pacer = Recorder(most, told)
        self.gate = Gate(self.pacer)
        self.callers: list[Caller] = []
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.problems.append(context))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    async def call(self, caller: Caller, use: Use, owner: str, weight: float, priority: int) -> None:
        try:
            async with self.gate.enter(use, caller.traffic, owner, weight=weight, priority=priority) as turn:
                caller.state, caller.turn, caller.entered_at = "inside", turn, self.loop.time()
                match await caller.leaves:
                    case "answered":
                        turn.answered({"input": 5, "output": 7})
                    case "refused":
                        turn.failed(EndpointError("x", status=429))
                    case "overloaded":
                        turn.failed(EndpointError("x", status=503, retry_after=2.0))
                    case "failed":
                        turn.failed(EndpointError("x", status=500))
                    case "raises":
                        raise EndpointError("x", status=400)
        finally:
            caller.state = "gone"

    @rule(
        traffic=st.sampled_from(["online", "batch"]),
        owner=st.sampled_from("ab"),
        weight=st.sampled_from([1.0, 3.0]),
        priority=st.integers(0, 2),
        tokens=st.floats(1.0, 1000.0),
    )
    def come(self, traffic: Traffic, owner: str, weight: float, priority: int, tokens: float) -> None:
        caller = Caller(traffic, self.loop.create_future())
        caller.task = self.loop.create_task(self.call(caller, Use(tokens, tokens), owner, weight, priority))
        self.callers.append(caller)

    @precondition(lambda self: self.callers)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["answered", "refused", "overloaded", "failed", "nothing", "raises"]),
    )
    def leave(self, data: st.DataObject, outcome: Outcome) -> None:
        caller = data.draw(st.sampled_from(self.callers))
        if not caller.leaves.done():
            caller.leaves.set_result(outcome)

    @precondition(lambda self: self.callers)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.callers)).task.cancel()

    @rule()
    def refuse(self) -> None:
        async def refuse() -> None:
            self.gate.refuse_waiting(DOWN)

        self.run(refuse())

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        async def some() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)

        self.run(some())

    @rule(seconds=st.sampled_from([1e-6, 0.01, 0.3, 5.0, 120.0]))
    def pass_time(self, seconds: float) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)

        self.run(wait())
        # All that could happen has happened.
        inside = [caller for caller in self.callers if caller.state == "inside"]
        waiting = [caller for caller in self.callers if caller.state == "waiting" and not caller.task.done()]
        assert self.gate.inside == self.pacer.under_way == len(inside)
        assert self.gate.waiting_online == sum(caller.traffic == "online" for caller in waiting)
        if seconds == 120.0 and waiting:
            assert len(inside) >= self.pacer.concurrency, "after two minutes, only places can be missing"

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "gate"):
            assert self.pacer.under_way <= self.gate.inside
            assert sum(not attempt.ended for attempt in self.pacer.attempts) == self.pacer.under_way
            assert len(self.pacer.outcomes) == len(self.pacer.attempts) - self.pacer.under_way
            assert not self.problems

    def teardown(self) -> None:
        if not hasattr(self, "gate"):
            return
        for caller in self.callers:
            if not caller.leaves.done():
                caller.leaves.set_result("answered")

        async def end() -> None:
            await asyncio.gather(*(caller.task for caller in self.callers), return_exceptions=True)

        self.run(end())
        assert all(attempt.ended for attempt in self.pacer.attempts)
        assert len(self.pacer.outcomes) == len(self.pacer.attempts)
        assert (self.gate.inside, self.gate.waiting_online, self.pacer.under_way) == (0, 0, 0)
        assert self.gate._owners == {}
        assert self.gate._timer is None, "nobody waits, so nothing is to be looked at"
        self.gate.close(DOWN)
        for caller in self.callers:
            if not caller.task.cancelled():
                caller.task.exception()
        self.loop.close()


TestGate = GateMachine.TestCase
TestGate.settings = settings(max_examples=100, stateful_step_count=30)
