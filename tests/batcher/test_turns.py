"""What comes in one turn of the event loop, or while there is nothing to decide, is told to the policy together."""

from __future__ import annotations

import asyncio

import pytest

from batchwright.batcher import Batcher
from batchwright.clock import ManualClock
from batchwright.errors import DeadlineExceeded, Overloaded

from .virtual import Model, outcome, play


def test_those_of_whom_the_policy_has_not_been_told_wait_like_the_others() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), max_waiting=4, clock=clock) as batcher:
            first = asyncio.create_task(batcher.compute("first"))
            await asyncio.sleep(0.5)
            # The model is busy until 1.0, so there is nothing to decide.
            calls = [asyncio.create_task(batcher.compute(word)) for word in ("a", "bb", "gone", "late")]
            refused = asyncio.create_task(batcher.compute("refused"))
            await asyncio.sleep(0)
            assert (batcher.stats().waiting, batcher.stats().running) == (4, 1)
            calls[2].cancel()
            await asyncio.sleep(0)
            assert batcher.stats().waiting == 3
            hasty = asyncio.create_task(batcher.compute("hasty", deadline=0.25))
            assert isinstance((await asyncio.gather(hasty, return_exceptions=True))[0], DeadlineExceeded)
            assert clock.now() == 0.75
            answers = await asyncio.gather(first, *calls, refused, return_exceptions=True)
            assert answers[:3] == ["FIRST", "A", "BB"]
            assert list(map(type, answers[3:])) == [asyncio.CancelledError, str, Overloaded]
            stats = batcher.stats()
            assert (stats.requests, stats.succeeded, stats.cancelled, stats.overloaded) == (6, 4, 1, 1)
            assert (stats.expired, stats.waiting, stats.running) == (1, 0, 0)
            assert stats.latency_ms.maximum == pytest.approx(1500.0)

    play(main)


def test_a_batch_cancelled_before_its_first_step_leaves_nobody_without_an_answer() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            call = asyncio.create_task(outcome(batcher, "x"))
            core = None
            while core is None or not core._groups:
                await asyncio.sleep(0)
                core = batcher._core
            (group,) = core._groups
            assert group.task is not None
            group.task.cancel()
            assert await call == "BatcherClosed"
            assert await outcome(batcher, "y") == "Y"

    play(main)


def test_the_deadline_counts_from_the_call_and_not_from_the_turn() -> None:
    async def main() -> None:
        clock = ManualClock()
        async with Batcher(Model(0.0), clock=clock) as batcher:
            first = asyncio.create_task(batcher.compute("a"))
            await asyncio.sleep(0)
            # In the turn of the first, which somebody holds up.
            clock.advance(0.05)
            assert await batcher.compute("b", deadline=0.04) == "B"
            assert await first == "A"

    asyncio.run(main())
