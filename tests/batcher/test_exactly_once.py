"""Every request is answered exactly once, whatever happens to it, to the model and to the batcher."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright import InferenceRequest, InferenceResponse
from batchwright.batcher import Batcher
from batchwright.clock import ManualClock
from batchwright.policies import (
    AtOnce,
    BySize,
    FairShare,
    Fifo,
    Goodput,
    LatencyCappedBatches,
    LikeLengths,
    MaxWait,
    Memory,
    Order,
    Policy,
    Shape,
    TargetLatency,
    Timing,
    Urgency,
    Window,
    WithinMemory,
)

from .virtual import play

ORDERS: list[Callable[[], Order]] = [Fifo, Urgency, FairShare]
SHAPES: list[Callable[[], Shape]] = [
    lambda: BySize(3),
    lambda: LikeLengths(4, 60),
    lambda: Goodput(4, 60),
    lambda: TargetLatency(2.0, inner=BySize(4)),
    lambda: TargetLatency(2.0, min_batch_size=2, inner=Goodput(4)),
    lambda: LatencyCappedBatches(Goodput(4)),
    lambda: WithinMemory(Memory(0.7, 1000), LikeLengths(4, 60)),
]
TIMINGS: list[Callable[[], Timing]] = [AtOnce, lambda: MaxWait(1.0), lambda: Window(0.75)]

_MOMENTS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])


@dataclass(frozen=True)
class Caller:
    """One request: when it comes, how it fares."""

    arrives: float
    length: int
    fate: str
    """"fine", "poison" (its batch raises), "error" (the model returns one for it)."""
    leaves_after: float | None
    deadline: float | None
    priority: int


CALLERS = st.builds(
    Caller,
    arrives=_MOMENTS,
    length=st.integers(1, 80),
    fate=st.sampled_from(["fine"] * 6 + ["poison", "error"]),
    leaves_after=st.one_of(st.none(), st.none(), _MOMENTS),
    deadline=st.one_of(st.none(), st.none(), st.sampled_from([0.5, 1.0, 4.0])),
    priority=st.integers(0, 9),
)


class Moody:
    """A model that obeys the fates, and now and then returns too few outputs."""

    def __init__(self, seconds: list[float], short_every: int) -> None:
        self.seconds = seconds
        self.short_every = short_every
        self.calls = 0
        self.busy = 0
        self.most_busy = 0
        self.answered: Counter[str] = Counter()

    async def generate_batch(self, prompts: list[str]) -> list[Any]:
        self.calls += 1
        call = self.calls
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await asyncio.sleep(self.seconds[call % len(self.seconds)])
        finally:
            self.busy -= 1
        if any("poison" in prompt for prompt in prompts):
            raise RuntimeError("poison")
        if self.short_every and call % self.short_every == 0:
            return ["too few"] * (len(prompts) - 1)
        self.answered.update(prompts)
        return [ValueError(prompt) if "error" in prompt else f"answer to {prompt}" for prompt in prompts]


@settings(max_examples=examples(80, long=250))
@given(
    callers=st.lists(CALLERS, min_size=1, max_size=14),
    order=st.sampled_from(ORDERS),
    shape=st.sampled_from(SHAPES),
    timing=st.sampled_from(TIMINGS),
    concurrency=st.integers(1, 2),
    max_waiting=st.sampled_from([3, 1000]),
    isolate=st.booleans(),
    seconds=st.lists(st.sampled_from([0.0, 0.25, 1.0, 20.0]), min_size=1, max_size=4),
    short_every=st.sampled_from([0, 0, 3]),
    close_at=st.sampled_from([0.0, 0.5, 2.0, 100.0]),
    drain=st.booleans(),
)
def test_every_request_is_answered_exactly_once(
    callers: list[Caller],
    order: Callable[[], Order],
    shape: Callable[[], Shape],
    timing: Callable[[], Timing],
    concurrency: int,
    max_waiting: int,
    isolate: bool,
    seconds: list[float],
    short_every: int,
    close_at: float,
    drain: bool,
) -> None:
    told: Counter[str] = Counter()
    model = Moody(seconds, short_every)

    def tell(response: InferenceResponse) -> None:
        told[response.request_id] += 1

    async def call(batcher: Batcher, number: int, caller: Caller) -> str:
        name = f"{number}-{caller.fate}-"
        prompt = name + "x" * caller.length
        request = InferenceRequest(
            prompt, request_id=name, deadline=caller.deadline, priority=caller.priority, callback=tell
        )
        await asyncio.sleep(caller.arrives)
        try:
            async with asyncio.timeout(caller.leaves_after):
                response = await batcher.add_request(request, tenant=number % 3)
        except TimeoutError as error:
            return "refused" if type(error) is not TimeoutError else "left"
        except Exception:
            return "refused"
        assert response.request_id == name
        if response.error is None:
            assert response.output == f"answer to {prompt}"
            assert caller.fate == "fine"
            return "succeeded"
        return "expired" if type(response.error).__name__ == "DeadlineExceeded" else "failed"

    async def main(clock: ManualClock) -> list[str]:
        policy = Policy(shape(), order=order(), timing=timing())
        batcher = Batcher(
            model, policy, concurrency=concurrency, max_waiting=max_waiting, isolate_failures=isolate, clock=clock
        )
        calls = [asyncio.create_task(call(batcher, n, caller)) for n, caller in enumerate(callers)]
        await asyncio.sleep(close_at)
        await batcher.close(drain=drain)
        fates = await asyncio.gather(*calls)
        stats = batcher.stats()
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.requests == stats.succeeded + stats.failed + stats.expired + stats.cancelled
        left = fates.count("left")
        for fate, counted in (("succeeded", stats.succeeded), ("failed", stats.failed), ("expired", stats.expired)):
            # Who leaves in the moment of the answer does not see it.
            assert fates.count(fate) <= counted <= fates.count(fate) + left
        return fates

    fates = play(main)
    assert max(told.values(), default=0) <= 1
    for number, (caller, fate) in enumerate(zip(callers, fates, strict=True)):
        taken = fate not in ("refused", "left")
        assert not taken or told[f"{number}-{caller.fate}-"] == 1
        assert fate != "refused" or told[f"{number}-{caller.fate}-"] == 0
    assert max(model.answered.values(), default=0) <= 1
    assert model.most_busy <= concurrency
    assert model.busy == 0
