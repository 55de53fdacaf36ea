"""Usage code of the simple asyncio classes that people write by hand runs with `from batchwright import ...`.

Each test is such code: positional arguments, attributes that are printed, workers that are started and cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

import batchwright
from batchwright import (
    AdaptiveBatcher,
    AsyncBatchConfig,
    AsyncBatchProcessor,
    AsyncEngine,
    Batcher,
    BucketedPadding,
    ContinuousBatcher,
    Engine,
    InferenceResponse,
    LengthAwareBatcher,
    MemoryEfficientBatcher,
    PackedSequences,
    PaddingConfig,
    PaddingOptimizer,
    ParallelBatchProcessor,
    PrioritizedRequest,
    PriorityBatcher,
    SimpleBatcher,
    StreamingBatchProcessor,
    TimeBasedBatcher,
    Usage,
)
from batchwright.clock import ManualClock
from batchwright.errors import InvalidRequest

from .virtual import play

# Type checkers know the form with names only.
InferenceRequest: Any = batchwright.InferenceRequest


class FakeModel:
    """What stands in for a model in code of this kind."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def generate_batch(self, prompts: list[str]) -> list[str]:
        self.sizes.append(len(prompts))
        await asyncio.sleep(0.05)
        return [f"Response to: {prompt}" for prompt in prompts]


def test_a_request_by_position() -> None:
    told: list[Any] = []
    request = InferenceRequest("req_1", "What is AI?", 128, 0.2, 1700000000.0, told.append)
    assert (request.request_id, request.prompt, request.max_tokens) == ("req_1", "What is AI?", 128)
    assert (request.temperature, request.created_at, request.callback) == (0.2, 1700000000.0, told.append)
    short = InferenceRequest("id", "prompt")
    assert (short.max_tokens, short.temperature, short.callback) == (256, 0.7, None)
    assert abs(short.created_at - time.time()) < 60
    assert InferenceRequest(request_id="id", prompt="prompt", max_tokens=5).prompt == "prompt"
    assert InferenceRequest("only a prompt").prompt == "only a prompt"
    mixed = InferenceRequest("id", prompt="prompt", max_tokens=5)
    assert (mixed.request_id, mixed.prompt, mixed.max_tokens) == ("id", "prompt", 5)
    assert len({request, short, InferenceRequest("id", "prompt")}) == 3
    with pytest.raises(InvalidRequest, match="max_tokens=0"):
        InferenceRequest("id", "prompt", 0)
    with pytest.raises(TypeError, match="max_tokens is given by position and by name"):
        InferenceRequest("id", "prompt", 5, max_tokens=5)
    with pytest.raises(TypeError, match="at most 6 values by position"):
        InferenceRequest("id", "prompt", 5, 0.1, 1.0, None, 7)


def test_a_response_of_four_fields() -> None:
    response = InferenceResponse("req_1", "an answer", 2, 12.5)
    assert (response.request_id, response.output, response.tokens_generated) == ("req_1", "an answer", 2)
    assert (response.latency_ms, response.finish_reason, response.error) == (12.5, "stop", None)

    class Model:
        async def generate_batch(self, prompts: list[str]) -> list[InferenceResponse]:
            return [InferenceResponse("", prompt.upper(), 3, 0.0) for prompt in prompts]

    async def main(clock: ManualClock) -> None:
        async with SimpleBatcher(Model(), 1, clock=clock) as batcher:
            response = await batcher.add_request(InferenceRequest("mine", "four characters"))
        assert (response.request_id, response.output, response.tokens_generated) == ("mine", "FOUR CHARACTERS", 3)
        assert response.usage == Usage(4, 3, is_estimate=True)

    play(main)


def test_simple_batcher() -> None:
    async def main(clock: ManualClock) -> None:
        model = FakeModel()
        batcher = SimpleBatcher(model, 4, 100, clock=clock)
        requests = [InferenceRequest(f"req_{i}", f"Prompt {i}", 256, 0.7) for i in range(6)]
        answers = asyncio.gather(*[batcher.add_request(request) for request in requests])
        await asyncio.sleep(0.06)
        assert len(batcher.queue) == 2
        assert batcher.queue[0] is requests[4]
        responses = await answers
        assert [response.request_id for response in responses] == [request.request_id for request in requests]
        assert responses[5].output == "Response to: Prompt 5"
        assert responses[5].tokens_generated == len("Response to: Prompt 5") // 4 + 1
        assert responses[0].latency_ms == pytest.approx(50.0)
        assert (model.sizes, len(batcher.queue)) == ([4, 2], 0)
        assert (batcher.batch_size, batcher.max_wait_ms) == (4, 100)
        with pytest.raises(AttributeError):
            batcher.queue = []  # type: ignore[misc]

    play(main)


def test_a_mock_is_a_model_without_a_tokenizer() -> None:
    async def main(clock: ManualClock) -> None:
        model = AsyncMock()
        model.generate_batch.side_effect = lambda prompts: [prompt.upper() for prompt in prompts]
        async with SimpleBatcher(model, 1, clock=clock) as batcher:
            assert (await batcher.add_request(InferenceRequest("a", "b"))).output == "B"

    play(main)


def test_time_based_batcher() -> None:
    async def main(clock: ManualClock) -> None:
        model = FakeModel()
        batcher = TimeBasedBatcher(model, window_ms=50, max_batch_size=32, clock=clock)
        responses = await asyncio.gather(*[batcher.add_request(InferenceRequest(f"r{i}", "x")) for i in range(5)])
        assert (len(responses), model.sizes, len(batcher.queue)) == (5, [5], 0)

    play(main)


def test_adaptive_batcher() -> None:
    async def main(clock: ManualClock) -> None:
        model = FakeModel()
        batcher = AdaptiveBatcher(model, 1, 32, 200, clock=clock)
        assert (batcher.current_batch_size, batcher.latency_history) == (1, [])
        for _ in range(8):
            await asyncio.gather(*[batcher.add_request(InferenceRequest(f"r{i}", "x")) for i in range(40)])
        assert 16 <= batcher.current_batch_size <= 32
        assert batcher.latency_history == [pytest.approx(50.0)] * min(100, len(model.sizes))
        with pytest.raises(AttributeError):
            batcher.current_batch_size = 5  # type: ignore[misc]

    play(main)


def test_priority_batcher_and_prioritized_requests() -> None:
    async def main(clock: ManualClock) -> None:
        order: list[str] = []

        async def model(prompts: list[str]) -> list[str]:
            order.extend(prompts)
            await asyncio.sleep(0.05)
            return prompts

        batcher = PriorityBatcher(model, 1, 100, clock=clock)
        await asyncio.gather(
            batcher.add_request(InferenceRequest("1", "first"), priority=5),
            batcher.add_request(InferenceRequest("2", "low"), 9),
            batcher.add_request(PrioritizedRequest(0, InferenceRequest("3", "urgent"))),
            batcher.add_request(InferenceRequest("4", "usual")),
        )
        assert order == ["urgent", "first", "usual", "low"]
        busy = [asyncio.create_task(batcher.add_request("busy"))]
        await asyncio.sleep(0.01)
        busy += [asyncio.create_task(batcher.add_request(f"of {priority}", priority)) for priority in (9, 5, 0)]
        await asyncio.sleep(0)
        assert [request.prompt for request in batcher.queue] == ["of 0", "of 5", "of 9"]
        await asyncio.gather(*busy)
        requests = [PrioritizedRequest(priority, InferenceRequest("id", "x")) for priority in (5, 1, 3)]
        assert [each.priority for each in sorted(requests)] == [1, 3, 5]

    play(main)


def test_length_aware_batcher() -> None:
    async def main(clock: ManualClock) -> None:
        model = FakeModel()
        batcher = LengthAwareBatcher(model, 4096, 32, clock=clock)
        lengths = [10, 4000, 12, 3900] * 8
        responses = await asyncio.gather(
            *[batcher.add_request(InferenceRequest(str(i), "x" * length)) for i, length in enumerate(lengths)]
        )
        assert len(responses) == 32
        assert batcher.stats().padding_efficiency > 0.9

    play(main)


def test_continuous_batcher() -> None:
    class StepModel:
        async def generate_step(self, prompts: list[str], partial_outputs: list[list[str]]) -> list[str]:
            await asyncio.sleep(0.01)
            words = [prompt.split() for prompt in prompts]
            return [
                each[len(partial)] if len(partial) < len(each) else ""
                for each, partial in zip(words, partial_outputs, strict=True)
            ]

    async def main(clock: ManualClock) -> None:
        batcher = ContinuousBatcher(StepModel(), 2, 2048, clock=clock)
        prompts = ["one two three", "four", "five six"]
        tasks = [
            asyncio.create_task(batcher.add_request(InferenceRequest(str(i), prompt)))
            for i, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(0)
        assert [request.request_id for request in batcher.queue] == ["2"]
        responses = await asyncio.gather(*tasks)
        assert [response.output for response in responses] == ["onetwothree", "four", "fivesix"]
        assert [response.tokens_generated for response in responses] == [3, 1, 2]
        assert len(batcher.queue) == 0

    play(main)


def test_padding_optimizer() -> None:
    optimizer = PaddingOptimizer(PaddingConfig(0, "left", 16))
    ids, mask = optimizer.pad_batch([[1, 2, 3], [4]])
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])
    assert optimizer.compute_padding_efficiency([[1, 2, 3], [4]]) == pytest.approx(4 / 6)
    assert PaddingOptimizer().pad_batch([[1], [2, 3]], 4)[0].shape == (2, 4)


def test_bucketed_padding() -> None:
    padding = BucketedPadding([64, 128, 256, 512, 1024, 2048], 0)
    assert list(padding.boundaries) == [64, 128, 256, 512, 1024, 2048]
    assert (padding.get_bucket(64), padding.get_bucket(65)) == (64, 128)
    sequences = [[1] * 10, [2] * 100, [3] * 64, [4] * 3000]
    buckets = padding.bucket_sequences(sequences)
    for boundary, members in buckets.items():
        batch = padding.pad_bucket(members, boundary)
        assert isinstance(batch, np.ndarray)
        assert batch.shape == (len(members), boundary)
    # What is longer than all boundaries is not cut: its bucket is as wide as it is.
    assert list(buckets) == [64, 128, 3000]


def test_packed_sequences() -> None:
    packer = PackedSequences(2048)
    packed, positions = packer.pack([[1, 2], [3, 4, 5]], separator_token=9)
    assert (packed, positions) == ([1, 2, 9, 3, 4, 5, 9], [(0, 2), (3, 6)])
    assert packer.unpack(packed, positions) == [[1, 2], [3, 4, 5]]
    assert packer.pack([[1, 2], [3]])[0] == [1, 2, 3]


def test_memory_efficient_batcher() -> None:
    class Model:
        async def generate_batch(self, sequences: list[list[int]]) -> list[list[int]]:
            return [sequence[::-1] for sequence in sequences]

    async def main(clock: ManualClock) -> None:
        batcher = MemoryEfficientBatcher(Model(), 1, 1000, clock=clock)
        assert batcher.estimate_memory(4, 500) == 2.0
        sequences = [[i] * 100 for i in range(50)]
        assert batcher.find_optimal_batch_size(sequences) == 10
        assert await batcher.process_with_memory_limit(sequences) == sequences
        assert batcher.stats().batches == 5

    play(main)


def test_async_batch_processor() -> None:
    async def main(clock: ManualClock) -> None:
        model = FakeModel()
        processor = AsyncBatchProcessor(model, AsyncBatchConfig(4, 16, 30.0), clock=clock)
        workers = await processor.start_workers(num_workers=2)
        responses = await asyncio.gather(*[processor.submit(InferenceRequest(f"r{i}", f"p{i}")) for i in range(64)])
        assert [response.output for response in responses] == [f"Response to: p{i}" for i in range(64)]
        assert max(model.sizes) == 16
        for worker in workers:
            worker.cancel()

        async def hangs(prompts: list[str]) -> list[str]:
            await asyncio.sleep(1e9)
            return prompts

        late = AsyncBatchProcessor(hangs, AsyncBatchConfig(timeout_seconds=0.5), clock=clock)
        with pytest.raises(asyncio.TimeoutError):
            await late.submit(InferenceRequest("id", "x"))

    play(main)


def test_parallel_batch_processor() -> None:
    async def main(clock: ManualClock) -> None:
        models = [FakeModel() for _ in range(3)]
        processor = ParallelBatchProcessor(models, 16, clock=clock)
        workers = await processor.start()
        responses = await asyncio.gather(*[processor.submit(InferenceRequest(f"r{i}", "x")) for i in range(96)])
        assert len(responses) == 96
        assert all(model.sizes for model in models)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    play(main)


def test_streaming_batch_processor() -> None:
    class StreamModel:
        async def generate_stream_batch(self, prompts: list[str]) -> AsyncIterator[list[str]]:
            words = [prompt.split() for prompt in prompts]
            for i in range(max(map(len, words)) + 2):
                await asyncio.sleep(0.01)
                # Nothing in the second step, for any of them.
                yield ["" if i == 1 else (each[i - (i > 1)] if i - (i > 1) < len(each) else "") for each in words]

    async def main(clock: ManualClock) -> None:
        processor = StreamingBatchProcessor(StreamModel(), 8, clock=clock)
        requests = [InferenceRequest("a", "one two three"), InferenceRequest("b", "four")]
        texts: dict[str, list[str]] = {}
        async for request_id, token in processor.process_streaming(requests):
            texts.setdefault(request_id, []).append(token)
        assert texts == {"a": ["one", "two", "three"], "b": ["four"]}

    play(main)


OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "50MB", "max_model_len": 512}


@pytest.fixture
def engine(shallow_path: Path) -> Engine:
    return Engine(shallow_path, **OPTIONS)


@pytest.mark.needs_model
def test_an_engine_is_a_model_that_honours_the_parameters_of_each_request(engine: Engine, shallow_path: Path) -> None:
    prompts = ["Once upon a time", "The capital of France is", "1, 2, 3,"]
    given = [
        batchwright.InferenceRequest(prompt, request_id=f"id of {prompt}", max_tokens=most, temperature=0.0)
        for prompt, most in zip(prompts, (3, 6, 9), strict=True)
    ]
    with Engine(shallow_path, **OPTIONS) as own:
        expected = [own.generate([request])[0] for request in given]

    async def main() -> None:
        shared = AsyncEngine(engine)
        made: list[Any] = [
            Batcher(shared),
            SimpleBatcher(shared, 3),
            TimeBasedBatcher(shared, 5),
            AdaptiveBatcher(shared),
            PriorityBatcher(shared, 3),
            LengthAwareBatcher(shared),
            MemoryEfficientBatcher(shared),
            ContinuousBatcher(shared),
        ]
        for batcher in made:
            async with batcher:
                responses = await asyncio.gather(*map(batcher.add_request, given))
            assert [each.output for each in responses] == [each.output for each in expected], type(batcher)
            assert [each.tokens_generated for each in responses] == [3, 6, 9]
            assert [each.usage for each in responses] == [each.usage for each in expected]
            assert [each.request_id for each in responses] == [each.request_id for each in given]
        processors: list[Any] = [
            AsyncBatchProcessor(shared),
            ParallelBatchProcessor([shared, AsyncEngine(shallow_path, **OPTIONS)], 1),
            StreamingBatchProcessor(shared),
        ]
        for processor in processors:
            async with processor:
                responses = await asyncio.gather(*map(processor.submit, given))
            assert [each.output for each in responses] == [each.output for each in expected], type(processor)
        async with Batcher(shared) as batcher:
            refused = await batcher.add_request(batchwright.InferenceRequest("x", max_tokens=100_000))
            assert isinstance(refused.error, InvalidRequest)
            # Ids are the callers': two may be the same.
            answers = await asyncio.gather(*[batcher.add_request(given[0]) for _ in range(2)])
            assert [(each.error, each.output) for each in answers] == [(None, expected[0].output)] * 2
        await shared.close()

    asyncio.run(main())


@pytest.mark.needs_model
def test_an_engine_that_is_given_belongs_to_the_batcher_and_bare_items_get_texts(engine: Engine) -> None:
    with Batcher(engine) as batcher:
        text = batcher.submit_item("The capital of France is").result()
        assert isinstance(text, str)
        assert text
    with pytest.raises(batchwright.BatchwrightError, match="closed"):
        engine.generate("x")
