"""Tries of lines when all of them fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

from batchwright.clock import ManualClock
from batchwright.errors import EndpointError
from batchwright.inference.inference import Call, Inference
from batchwright.lines.line_executor import LineExecutor
from batchwright.lines.line_retries import RetryPolicy

LINES, IN_VAIN = 10, 25


class Broken(Inference):
    """Fails each call, until it is mended."""

    models = ("m",)
    wants = LINES

    def __init__(self) -> None:
        self.mended = asyncio.Event()
        self.asked = self.inside = self.most_inside = 0

    async def answer(self, call: Call) -> dict[str, Any]:
        self.asked += 1
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        await asyncio.sleep(0)
        self.inside -= 1
        if not self.mended.is_set():
            raise EndpointError("down", status=500)
        return {}

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def test_one_line_at_a_time_is_tried_again_while_all_fail() -> None:
    asyncio.run(_all_fail())


async def _all_fail() -> None:
    inference, clock, done = Broken(), ManualClock(5.0), list[int]()
    executor = LineExecutor[int](
        inference,
        call_of=lambda line, pauses: Call("/v1/completions", {}, str(line), pauses=pauses),
        done=lambda line, outcome: done.append(line),
        following=lambda: None,
        timeout=None,
        retries=RetryPolicy(first_delay=0.0, longest_delay=0.0, most_in_vain=IN_VAIN),
        clock=clock,
        draw=random.Random(0),
    )
    for line in range(LINES):
        executor.start(line)
    assert executor.failing_since is None
    await until(lambda: inference.asked >= IN_VAIN + 2 * LINES)  # those that were on their way when it was enough
    inference.most_inside = 0
    await until(lambda: inference.asked >= IN_VAIN + 5 * LINES)
    assert inference.most_inside == 1
    assert executor.all_fail
    assert executor.failing_since == 5.0
    assert " to be tried again, one at a time as all fail, the last after: down" in (executor.why_pausing or "")
    inference.mended.set()
    inference.most_inside = 0
    await until(lambda: not executor)
    assert sorted(done) == list(range(LINES))
    assert inference.most_inside > 1, "all go on when one was answered"
    assert executor.failing_since is None
