"""The tokens of many requests in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from batchwright import InferenceRequest, InferenceResponse, Prompt
from batchwright.batcher import StreamingBatchProcessor
from batchwright.clock import ManualClock
from batchwright.errors import (
    BatcherClosed,
    BatchwrightError,
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationError,
    InvalidRequest,
)

from .tokens import Steps, Streams, gather, request
from .virtual import play


@pytest.mark.parametrize("kind", [Steps, Streams])
def test_a_slow_sequence_holds_nobody_back_and_slots_refill(kind: type[Steps] | type[Streams]) -> None:
    async def main(clock: ManualClock) -> None:
        async with StreamingBatchProcessor(kind(), 2, clock=clock) as processor:
            prompts = ["slow:9", "a:1", "b:2", "c:1"]
            stream = processor.process_streaming(map(request, prompts))
            seen = [(clock.now(), request_id, token) async for request_id, token in stream]
        assert [(name, token) for _, name, token in seen if name != "slow:9"] == [
            ("a:1", "a0 "),
            ("b:2", "b0 "),
            ("b:2", "b1 "),
            ("c:1", "c0 "),
        ]
        assert [at for at, name, _ in seen if name == "slow:9"] == [float(n) for n in range(1, 10)]
        # A step model ends a sequence with an empty token; a stream ends with its last.
        assert [at for at, name, _ in seen if name != "slow:9"] == [1.0, 3.0, 4.0, 6.0 if kind is Steps else 5.0]
        assert processor.stats().succeeded == 4

    play(main)


def test_requests_are_read_as_they_can_be_placed() -> None:
    read: list[str] = []

    def endless() -> Iterator[InferenceRequest]:
        while True:
            read.append(f"{len(read)}:2")
            yield request(read[-1])

    async def main(clock: ManualClock) -> None:
        async with StreamingBatchProcessor(Steps(), 3, clock=clock) as processor:
            async with aclosing(processor.process_streaming(endless())) as stream:
                async for request_id, token in stream:
                    assert len(read) <= 3 + 3 * int(clock.now() / 3)
                    if token == "9" and request_id == "9:2":
                        break
                    if clock.now() > 20:
                        break
            assert processor.stats().running == 0

    play(main)


def test_a_reader_that_is_behind_bounds_what_is_begun() -> None:
    async def main(clock: ManualClock) -> None:
        async with StreamingBatchProcessor(Steps(base=0.01), 2, clock=clock) as processor:
            requests = (request(f"{n}:8") for n in range(10_000))
            async with aclosing(processor.process_streaming(requests)) as stream:
                await anext(stream)
                await asyncio.sleep(1e4)
                stats = processor.stats()
                assert stats.running == 0
                # 64 for each slot, and what was begun before they were reached.
                assert 129 <= stats.generated_tokens <= 129 + 2 * 8
                for _ in range(40):
                    await anext(stream)
                    await asyncio.sleep(0)
                assert processor.stats().running > 0

    play(main)


class _Faulty(Steps):
    def token(self, prompt: str, output: str) -> Any:
        return KeyError(prompt) if output and prompt.startswith("bad") else super().token(prompt, output)


def test_errors_are_told_to_callbacks_and_raised_together_at_the_end() -> None:
    async def main(clock: ManualClock) -> None:
        told: list[InferenceResponse] = []
        requests: list[InferenceRequest | Prompt] = [
            request("a:2"),
            request("bad:3", callback=told.append),
            "far too long a prompt:1",
            request("late:9", deadline=2.5),
            [],
            request("b:1"),
            request("slow:9", n=2),
        ]
        seen: list[tuple[str, str]] = []
        async with StreamingBatchProcessor(_Faulty(), 2, max_sequence_length=16, length=len, clock=clock) as processor:
            with pytest.raises(ExceptionGroup, match="5 requests failed") as raised:
                await gather(processor.process_streaming(requests), seen)
            assert dict(seen).keys() == {"a:2", "bad:3", "late:9", "b:1"}
            kinds = [type(error) for error in raised.value.exceptions]
            assert set(kinds) == {GenerationError, ContextLengthExceeded, DeadlineExceeded, InvalidRequest}
            notes = [note for error in raised.value.exceptions for note in error.__notes__]
            assert {"request bad:3", "request late:9", "request requests[4]", "request slow:9"} < set(notes)

            failures: dict[str, BatchwrightError] = {}
            fine = [pair async for pair in processor.process_streaming([request("a:1"), request("bad:1")], failures)]
            assert fine == [("a:1", "a0 "), ("bad:1", "bad0 ")]
            assert list(failures) == ["bad:1"]
            assert isinstance(failures["bad:1"].__cause__, KeyError)
        assert [response.output for response in told] == ["bad0 "]

    play(main)


def test_two_that_run_at_once_need_ids_of_their_own() -> None:
    async def main(clock: ManualClock) -> None:
        failures: dict[str, BatchwrightError] = {}
        async with StreamingBatchProcessor(Steps(), clock=clock) as processor:
            stream = processor.process_streaming([request("a:2"), request("a:2")], failures)
            assert [token async for _, token in stream] == ["a0 ", "a1 "]
        assert "give each its own" in str(failures["a:2"])

    play(main)


def test_an_error_of_the_requests_is_raised_when_what_had_begun_has_been_read() -> None:
    async def broken() -> AsyncIterator[InferenceRequest]:
        yield request("a:2")
        raise OSError("disk")

    async def main(clock: ManualClock) -> None:
        async with StreamingBatchProcessor(_Faulty(), clock=clock) as processor:
            seen: list[tuple[str, str]] = []
            with pytest.raises(OSError, match="disk"):
                await gather(processor.process_streaming(broken()), seen)
            assert seen == [("a:2", "a0 "), ("a:2", "a1 ")]

            async def both() -> AsyncIterator[InferenceRequest]:
                yield request("bad:2")
                raise OSError("disk")

            with pytest.raises(ExceptionGroup) as raised:
                await gather(processor.process_streaming(both()), [])
            assert [type(error) for error in raised.value.exceptions] == [GenerationError, OSError]

    play(main)


def test_requests_that_are_cancelled_at_their_source_are_an_error_and_no_end() -> None:
    async def source() -> AsyncIterator[Prompt]:
        yield "a:2"
        raise asyncio.CancelledError

    async def main(clock: ManualClock) -> None:
        seen: list[str] = []
        async with StreamingBatchProcessor(Steps(), 2, clock=clock) as processor:
            stream = processor.process_streaming(source())
            seen += [(await anext(stream))[1] for _ in range(2)]
            with pytest.raises(RuntimeError, match="requests: what gives them was cancelled"):
                await anext(stream)
        assert seen == ["a0 ", "a1 "]

    play(main)


def test_leaving_early_or_being_cancelled_cancels_what_runs() -> None:
    async def main(clock: ManualClock) -> None:
        model = Streams()
        async with StreamingBatchProcessor(model, 2, clock=clock) as processor:
            async for _ in processor.process_streaming(request(f"{n}:9") for n in range(9)):
                break
            await asyncio.sleep(1.5)
            assert (processor.stats().cancelled, processor.stats().running, model.open) == (2, 0, 0)

            async def reads() -> None:
                async for _ in processor.process_streaming(request(f"{n}:9") for n in range(9)):
                    pass

            reader = asyncio.create_task(reads())
            await asyncio.sleep(1.5)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await asyncio.sleep(0)
            assert (processor.stats().cancelled, processor.stats().running) == (4, 0)

    play(main)


def test_a_processor_that_is_closed_meanwhile_loses_no_error() -> None:
    async def main(clock: ManualClock) -> None:
        processor = StreamingBatchProcessor(Steps(), 2, clock=clock)

        async def reads() -> None:
            async for _ in processor.process_streaming(request(f"{n}:9") for n in range(10**9)):
                pass

        reader = asyncio.create_task(reads())
        await asyncio.sleep(1.5)
        await processor.close(drain=False)
        with pytest.raises(ExceptionGroup) as raised:
            await reader
        assert [type(error) for error in raised.value.exceptions] == [BatcherClosed] * 3

    play(main)


def test_single_requests_are_answered_too() -> None:
    async def main(clock: ManualClock) -> None:
        async with StreamingBatchProcessor(Steps(), clock=clock) as processor:
            assert (await processor.submit("a:2")).output == "a0 a1 "
            with pytest.raises(TypeError, match="requests of type str"):
                await anext(processor.process_streaming("a:2"))
        with pytest.raises(BatcherClosed):
            await anext(processor.process_streaming(["a:2"]))

    play(main)
    with pytest.raises(ValueError, match="batch_size=0"):
        StreamingBatchProcessor(Steps(), 0)


def test_another_event_loop_is_refused() -> None:
    processor = StreamingBatchProcessor(Steps(base=0.0))
    assert processor.batcher.submit("a:1").result().output == "a0 "

    async def main() -> None:
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await anext(processor.process_streaming(["a:1"]))

    asyncio.run(main())
    processor.batcher.shutdown()


def test_over_an_engine(shallow_path: Path) -> None:
    from batchwright import AsyncEngine, SamplingParams

    params = SamplingParams(max_tokens=5, temperature=0.0)
    prompts = ["Once upon a time", "The capital of France is", "1, 2, 3,"]
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "50MB", "max_model_len": 128}

    async def main() -> None:
        async with await asyncio.to_thread(AsyncEngine, shallow_path, **options) as engine:
            expected = {prompt: (await engine.generate(prompt, params)).output for prompt in prompts}
            async with StreamingBatchProcessor(engine, 2) as processor:
                failures: dict[str, BatchwrightError] = {}
                texts = dict.fromkeys(prompts, "")
                requests = [InferenceRequest.of(prompt, params, request_id=prompt) for prompt in prompts]
                requests.append(InferenceRequest("x", max_tokens=1000, request_id="too long"))
                async for request_id, token in processor.process_streaming(requests, failures):
                    texts[request_id] += token
                assert texts == expected
                assert [type(error) for error in failures.values()] == [ContextLengthExceeded]

    asyncio.run(main())
