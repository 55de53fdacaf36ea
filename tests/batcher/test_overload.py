"""More than the model can do, with deadlines: what it can do is still done in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.long_form import examples

from batchwright.batcher import AdaptiveBatcher, Batcher, PriorityBatcher, SimpleBatcher, TimeBasedBatcher
from batchwright.clock import ManualClock
from batchwright.errors import DeadlineExceeded

from .virtual import Model, play

_SECONDS = examples(10, long=20)


@pytest.mark.parametrize(
    "make",
    [
        lambda model, clock: SimpleBatcher(model, 8, clock=clock),
        lambda model, clock: TimeBasedBatcher(model, 20, 8, clock=clock),
        lambda model, clock: AdaptiveBatcher(model, 1, 8, target_latency_ms=200, clock=clock),
        lambda model, clock: PriorityBatcher(model, 8, clock=clock),
        lambda model, clock: Batcher(model, clock=clock),
    ],
    ids=["simple", "window", "adaptive", "priority", "auto"],
)
@pytest.mark.parametrize("load", [0.8, pytest.param(1.1, marks=pytest.mark.long), 1.5])
def test_deadlines_do_not_collapse_under_overload(make: Callable[[Model, ManualClock], Batcher], load: float) -> None:
    # 28 ms for eight: 286 requests a second, or somewhat more in larger batches.
    model = Model(base=0.02, each=0.001)
    rate = load * 286

    async def main(clock: ManualClock) -> None:
        in_time = 0
        batcher = make(model, clock)

        async def ask(number: int) -> None:
            nonlocal in_time
            await asyncio.sleep(number / rate)
            try:
                await batcher.compute("x", deadline=0.5)
                in_time += 1
            except DeadlineExceeded as error:
                assert (error.predicted_ms or 1e9) > 500  # noqa: PT017 - most do not raise

        await asyncio.gather(*(ask(number) for number in range(int(rate * _SECONDS))))
        await batcher.close()
        assert in_time > 0.9 * min(rate, 286) * _SECONDS

    play(main)
