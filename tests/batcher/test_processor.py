"""Several batches at once."""

from __future__ import annotations

import asyncio

import pytest

from batchwright import InferenceRequest, InferenceResponse
from batchwright.batcher import AsyncBatchConfig, AsyncBatchProcessor, ParallelBatchProcessor
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
                began = clock.now()
                with pytest.raises(TimeoutError) as raised:
                    await processor.submit(InferenceRequest("x", deadline=own), deadline=deadline)
                assert isinstance(raised.value, DeadlineExceeded)
                return clock.now() - began

            assert list(await asyncio.gather(ends(None, None), ends(2.0, None), ends(9.0, 3.0))) == [5.0, 2.0, 3.0]

    play(main)


def test_it_belongs_to_the_loop_in_which_its_workers_were_started() -> None:
    async def main(clock: ManualClock) -> None:
        processor = AsyncBatchProcessor(Model(), clock=clock)
        workers = await processor.start_workers()
        with pytest.raises(RuntimeError, match="await add_request"):
            processor.batcher.submit("x")
        await processor.close()
        with pytest.raises(BatcherClosed):
            await processor.submit("x")
        assert await asyncio.gather(*workers) == [None, None]

    play(main)


def test_workers_need_not_be_started_and_may_be_cancelled() -> None:
    async def main(clock: ManualClock) -> None:
        processor = AsyncBatchProcessor(Model(), clock=clock)
        workers = await processor.start_workers(num_workers=3)
        parallel = ParallelBatchProcessor([Model(), Model()], clock=clock)
        workers += await parallel.start()
        assert len(workers) == 5
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        answers = await asyncio.gather(processor.submit("a"), parallel.submit("b"))
        assert [answer.output for answer in answers] == ["A", "B"]
        await processor.close()
        await parallel.close()
        with pytest.raises(ValueError, match="num_workers=0"):
            await processor.start_workers(0)

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
        answer = processor.submit_sync("x")
        assert isinstance(answer.exception(), TimeoutError)


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
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in ended] == [BatcherClosed] * 3

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
