"""Several batches at once."""

from __future__ import annotations

import asyncio

import pytest

from batchwright import InferenceRequest, InferenceResponse
from batchwright.batcher import AsyncBatchConfig, AsyncBatchProcessor
from batchwright.clock import ManualClock
from batchwright.errors import BatcherClosed, DeadlineExceeded

from .virtual import Model, play


def test_at_most_so_many_batches_of_at_most_so_many_requests_are_in_the_model() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1.0)
        async with AsyncBatchProcessor(model, AsyncBatchConfig(2, 3), clock=clock) as processor:
            responses = await asyncio.gather(*(processor.submit(str(n)) for n in range(10)))
        assert [response.output for response in responses] == [str(n) for n in range(10)]
        assert [len(batch) for batch in model.batches] == [3, 3, 3, 1]
        assert model.starts == [0.0, 0.0, 1.0, 1.0]
        assert processor.stats().succeeded == 10

    play(main)


def test_a_request_is_answered_after_the_timeout_or_its_own_deadline() -> None:
    async def main(clock: ManualClock) -> None:
        config = AsyncBatchConfig(timeout_seconds=5.0)
        async with AsyncBatchProcessor(Model(base=1e6), config, clock=clock) as processor:

            async def ends(deadline: float | None, own: float | None) -> float:
                response = await processor.submit(InferenceRequest("x", deadline=own), deadline=deadline)
                assert isinstance(response.error, DeadlineExceeded)
                return response.latency_ms

            assert list(await asyncio.gather(ends(None, None), ends(2.0, None), ends(9.0, 3.0))) == [5e3, 2e3, 3e3]

    play(main)


def test_it_belongs_to_the_loop_in_which_its_workers_were_started() -> None:
    async def main(clock: ManualClock) -> None:
        processor = AsyncBatchProcessor(Model(), clock=clock)
        await processor.start_workers()
        with pytest.raises(RuntimeError, match="await add_request"):
            processor.batcher.submit("x")
        await processor.close()
        with pytest.raises(BatcherClosed):
            await processor.submit("x")

    play(main)


def test_it_may_be_used_without_an_event_loop() -> None:
    with AsyncBatchProcessor(lambda items: items) as processor:
        assert processor.submit_sync("x").result().output == "x"
    with pytest.raises(BatcherClosed):
        processor.submit_sync("x")


def test_the_timeout_counts_without_an_event_loop_too() -> None:
    async def hangs(items: list[str]) -> list[str]:
        await asyncio.Event().wait()
        return items

    with AsyncBatchProcessor(hangs, AsyncBatchConfig(timeout_seconds=0.001)) as processor:
        assert isinstance(processor.submit_sync("x").result().error, DeadlineExceeded)


def test_an_error_in_the_block_leaves_what_waits() -> None:
    async def main(clock: ManualClock) -> None:
        processor = AsyncBatchProcessor(Model(base=1e6), AsyncBatchConfig(1, 1, 1e9), clock=clock)
        tasks: list[asyncio.Task[InferenceResponse]] = []

        async def block() -> None:
            async with processor:
                tasks.extend(asyncio.create_task(processor.submit("x")) for _ in range(3))
                await asyncio.sleep(1.0)
                raise KeyError

        with pytest.raises(KeyError):
            await block()
        assert clock.now() == 1.0
        assert all(isinstance(each.error, BatcherClosed) for each in await asyncio.gather(*tasks))

    play(main)


def test_what_is_no_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="AsyncBatchConfig"):
        AsyncBatchProcessor(Model(), {"batch_size": 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_concurrent_batches"):
        AsyncBatchProcessor(Model(), concurrency=3)
    with pytest.raises(TypeError, match="policy"):
        AsyncBatchProcessor(Model(), policy="auto")


@pytest.mark.parametrize(
    "settings", [{"max_concurrent_batches": 0}, {"batch_size": -1}, {"timeout_seconds": 0.0}, {"batch_size": True}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        AsyncBatchConfig(**settings)
