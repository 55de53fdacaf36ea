"""How many calls an endpoint gets at once, and who is let in first."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.backends.concurrency import AimdLimit, Gate


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


def test_who_is_cancelled_at_the_gate_leaves_no_trace() -> None:
    async def main() -> None:
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

    asyncio.run(main())
