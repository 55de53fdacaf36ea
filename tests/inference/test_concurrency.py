"""How many calls an endpoint gets at once, and who is let in first."""

from __future__ import annotations

import asyncio

import pytest
from batchwright.inference.endpoint_concurrency import AimdLimit, Gate

from .running import in_real_time


def test_the_limit_is_halved_once_a_round_and_rises_by_one() -> None:
    limit = AimdLimit(64)
    for _ in range(10):
        limit.overloaded(0)
    assert (limit.value, limit.round) == (32, 1)
    for _ in range(33):
        limit.succeeded()
    assert limit.value == 33
    for began in range(1, 20):
        limit.overloaded(began)
    assert limit.value == 1
    for _ in range(10_000):
        limit.succeeded()
    assert limit.value == 64
    with pytest.raises(ValueError, match="max_concurrency=0"):
        AimdLimit(0)


@in_real_time
async def test_who_is_cancelled_at_the_gate_leaves_no_trace() -> None:
    gate = Gate(AimdLimit(1))
    entered: list[str] = []

    async def enter(name: str, leave: asyncio.Event) -> None:
        async with gate.enter("online"):
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
    async with gate.enter("batch"):
        late = asyncio.ensure_future(enter("d", leave))
        await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    assert (gate.inside, gate.waiting_online, entered) == (0, 0, ["a", "c"])


@in_real_time
async def test_places_follow_priorities_and_weights() -> None:
    gate = Gate(AimdLimit(1))
    entered: list[str] = []
    calls = [("a", 1.0, 5), ("a", 1.0, 5), ("b", 2.0, 5), ("b", 2.0, 5), ("b", 2.0, 5), ("a", 1.0, 0)]
    leave = asyncio.Event()

    async def enter(owner: str, weight: float, priority: int) -> None:
        async with gate.enter("online", owner, weight=weight, priority=priority):
            entered.append(f"{owner}{priority}")
            await leave.wait()

    async with gate.enter("online"):
        tasks = [asyncio.ensure_future(enter(*call)) for call in calls]
        await asyncio.sleep(0)
        gate.limit = AimdLimit(5)
    await asyncio.sleep(0)
    # The urgent one; then b, twice as heavy, has two for each of a.
    assert entered == ["a0", "b5", "b5", "a5", "b5"]
    leave.set()
    await asyncio.gather(*tasks)
    assert (gate.inside, gate.waiting_online, gate._owners) == (0, 0, {})


@in_real_time
async def test_the_next_place_is_for_the_owner_with_the_fewest() -> None:
    gate = Gate(AimdLimit(2))
    entered: list[str] = []
    leaves = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1", "c1")}

    async def enter(name: str) -> None:
        async with gate.enter("online", name[0]):
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
