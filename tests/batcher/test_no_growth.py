"""Many requests through each batcher leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
from asyncio import BaseEventLoop
from collections.abc import Awaitable, Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from tests.long_form import examples

from batchwright.batcher import (
    AdaptiveBatcher,
    AsyncBatchProcessor,
    Batcher,
    LengthAwareBatcher,
    MemoryEfficientBatcher,
    ParallelBatchProcessor,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.clock import ManualClock

from .virtual import play

REQUESTS = examples(30_000, long=100_000)
CALLERS = 200
WARM_UP = 40
"""Requests of each caller before anything is counted: tables, histograms and pools have found their sizes by then."""
ALLOWED = examples(200, long=400)
"""Objects, among 22,000 requests: one for every 100 of them would be found. Histograms still gain some buckets."""
_OF_THE_PROGRAM = (ModuleType, FunctionType, CodeType, type, BaseEventLoop)


async def _model(items: list[str]) -> list[str]:
    await asyncio.sleep(0.01)
    return items


Make = Callable[[ManualClock], Batcher | AsyncBatchProcessor | ParallelBatchProcessor]

BATCHERS: dict[str, Make] = {
    "simple": lambda clock: SimpleBatcher(_model, 64, 10, clock=clock),
    "window": lambda clock: TimeBasedBatcher(_model, 10, 64, clock=clock),
    "adaptive": lambda clock: AdaptiveBatcher(_model, max_batch_size=64, clock=clock),
    "priority": lambda clock: PriorityBatcher(_model, 64, 10, clock=clock),
    "length_aware": lambda clock: LengthAwareBatcher(_model, 4096, 64, clock=clock),
    "memory": lambda clock: MemoryEfficientBatcher(_model, 4, 1000, clock=clock),
    "auto": lambda clock: Batcher(_model, clock=clock),
    "async": lambda clock: AsyncBatchProcessor(_model, clock=clock),
    "parallel": lambda clock: ParallelBatchProcessor([_model, _model], 64, clock=clock),
}


@pytest.mark.parametrize("name", BATCHERS)
def test_many_requests_leave_nothing_behind(name: str) -> None:
    async def main(clock: ManualClock) -> tuple[int, int]:
        made = BATCHERS[name](clock)
        batcher = made if isinstance(made, Batcher) else made.batcher
        async with made:
            await _call(batcher.compute, WARM_UP)
            before = _held_by(batcher)
            await _call(batcher.compute, REQUESTS // CALLERS - WARM_UP)
            grown = _held_by(batcher) - before
        return batcher.stats().succeeded, grown

    succeeded, grown = play(main)
    assert succeeded == REQUESTS
    assert grown < ALLOWED


async def _call(compute: Callable[..., Awaitable[Any]], times: int) -> None:
    """Requests of different lengths, priorities and deadlines, as many at a time as there are callers."""

    async def caller(number: int) -> None:
        item, priority = "x" * (10 + number % 7 * 9), number % 10
        deadline = 1e3 + number if number % 4 == 0 else None
        for _ in range(times):
            await compute(item, priority=priority, deadline=deadline)

    await asyncio.gather(*map(caller, range(CALLERS)))


def _held_by(batcher: Batcher) -> int:
    """How many objects can be reached from a batcher, what belongs to the program (modules, code, types) left out."""
    gc.collect()
    reached: dict[int, object] = {}
    rest: list[object] = [batcher]
    while rest:
        each = rest.pop()
        if id(each) not in reached and not isinstance(each, _OF_THE_PROGRAM):
            reached[id(each)] = each
            rest += gc.get_referents(each)
    return len(reached)
