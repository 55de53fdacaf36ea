"""Token by token: who is in which step, how sequences end, and what a batcher is made of."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchwright import InferenceRequest, InferenceResponse, InvalidRequest, Usage
from batchwright.batcher import ContinuousBatcher
from batchwright.clock import ManualClock
from batchwright.errors import (
    BatcherClosed,
    ContextLengthExceeded,
    DeadlineExceeded,
)
from batchwright.policies import Fifo

from .tokens import Steps, Streams, request, tokens_of
from .virtual import at, play


def test_requests_join_and_leave_between_steps() -> None:
    async def main(clock: ManualClock) -> None:
        model = Steps()
        async with ContinuousBatcher(model, 2, clock=clock) as batcher:
            responses = await asyncio.gather(
                *(batcher.add_request(prompt) for prompt in ("a:1", "b:4", "c:2")), at(3.5, batcher.add_request("d:1"))
            )
        assert [response.output for response in responses] == ["a0 ", "b0 b1 b2 b3 ", "c0 c1 ", "d0 "]
        # A sequence ends with an empty token, which is a step of its own.
        assert model.steps == [
            ["a:1", "b:4"],
            ["a:1", "b:4"],
            ["b:4", "c:2"],
            ["b:4", "c:2"],
            ["b:4", "c:2"],
            ["d:1"],
            ["d:1"],
        ]
        first, second, third, _ = responses
        assert (first.tokens_generated, second.tokens_generated, third.tokens_generated) == (1, 4, 2)
        assert (first.queue_ms, third.queue_ms) == (0.0, 2000.0)
        assert (first.ttft_ms, third.ttft_ms) == (1000.0, 3000.0)
        assert third.latency_ms == 5000.0
        stats = batcher.stats()
        assert (stats.requests, stats.succeeded, stats.batches, stats.items) == (4, 4, 7, 12)
        assert stats.reasons == {"full": 5, "idle": 2}
        assert (stats.ttft_ms.count, stats.ttft_ms.maximum) == (4, 3000.0)
        assert (stats.tpot_ms.count, stats.tpot_ms.mean) == (2, 1000.0)
        assert stats.generated_tokens == 8
        assert (stats.waiting, stats.running) == (0, 0)

    play(main)


def test_it_goes_on_after_it_had_nothing_to_do_and_then_holds_nothing() -> None:
    async def main(clock: ManualClock) -> None:
        batcher = ContinuousBatcher(Steps(), clock=clock)
        for moment in (0.0, 100.0):
            response = await at(moment, batcher.add_request(request("x:1", deadline=1e6)))
            assert response.latency_ms == 2000.0
        core = weakref.ref(batcher._core)
        del batcher
        for _ in range(2):
            await asyncio.sleep(0)
        gc.collect()
        assert core() is None

    play(main)


def test_the_most_urgent_get_the_free_slots_or_whoever_the_order_says() -> None:
    async def main(clock: ManualClock) -> None:
        for order, expected in (
            (None, ["first:1", "urgent:1", "usual:1"]),
            (Fifo(), ["first:1", "usual:1", "urgent:1"]),
        ):
            model = Steps()
            async with ContinuousBatcher(model, 1, order=order, clock=clock) as batcher:
                start = clock.now()
                await asyncio.gather(
                    batcher.add_request("first:1"),
                    at(start + 0.1, batcher.add_request("usual:1")),
                    at(start + 0.2, batcher.add_request("urgent:1", priority=0)),
                )
            assert [step[0] for step in model.steps][::2] == expected

    play(main)


@pytest.mark.parametrize(
    ("fields", "output", "reason", "tokens"),
    [
        ({}, "x0 x1 x2 x3 ", "stop", 4),
        ({"max_tokens": 2}, "x0 x1 ", "length", 2),
        ({"stop": "x2"}, "x0 x1 ", "stop", 3),
        ({"stop": "1 x2"}, "x0 x", "stop", 3),
        ({"stop": ["2 x", "nowhere"], "max_tokens": 3}, "x0 x1 x2 ", "length", 3),
        ({"stop": "x0", "min_tokens": 2}, "x0 x1 x2 x3 ", "stop", 4),
    ],
)
def test_ends(fields: dict[str, Any], output: str, reason: str, tokens: int) -> None:
    async def main(clock: ManualClock) -> None:
        told: list[InferenceResponse] = []
        async with ContinuousBatcher(Steps(), clock=clock) as batcher:
            response = await batcher.add_request(request("x:4", callback=told.append, metadata={"k": 1}, **fields))
            pieces = [piece async for piece in batcher.stream(request("x:4", **fields))]
        assert (response.output, response.finish_reason, response.tokens_generated) == (output, reason, tokens)
        assert response.metadata == {"k": 1}
        assert told == [response]
        assert "".join(pieces) == output

    play(main)


def test_prompt_and_output_fit_in_the_length_together() -> None:
    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Steps(), max_sequence_length=6, length=len, clock=clock) as batcher:
            response = await batcher.add_request("x:9")
            assert (response.output, response.finish_reason) == ("x0 x1 x2 ", "length")
            with pytest.raises(ContextLengthExceeded, match="max_sequence_length=6"):
                await batcher.add_request("long:9")
            with pytest.raises(InvalidRequest, match="n=2"):
                await batcher.add_request(request("x:1", n=2))
            with pytest.raises(InvalidRequest, match="logprobs=3"):
                await batcher.add_request(request("x:1", logprobs=3))
            with pytest.raises(InvalidRequest, match="stop_token_ids"):
                await batcher.add_request(request("x:1", stop_token_ids=(2,)))
        model = Steps()
        model.tokenizer = _Words()  # type: ignore[attr-defined]
        async with ContinuousBatcher(model, max_sequence_length=6, clock=clock) as batcher:
            response = await batcher.add_request("a-long-name:9")
            assert (response.usage, response.finish_reason) == (Usage(1, 5), "length")

    play(main)


class _Words:
    def encode(self, text: str) -> list[int]:
        return [0]


def test_closing_computes_what_is_there_or_answers_it_at_once() -> None:
    async def main(clock: ManualClock) -> None:
        for drain, ends in ((True, 6.0), (False, 0.5)):
            start = clock.now()
            batcher = ContinuousBatcher(Steps(), 1, clock=clock)
            tasks = [asyncio.create_task(batcher.add_request("x:1")) for _ in range(3)]
            await asyncio.sleep(0.5)
            await batcher.close(drain=drain)
            assert clock.now() - start == ends
            responses = await asyncio.gather(*tasks)
            assert [type(each.error) for each in responses] == [type(None) if drain else BatcherClosed] * 3
            with pytest.raises(BatcherClosed):
                await batcher.add_request("x:1")
            await batcher.close()

    play(main)


def test_the_model_may_take_the_requests() -> None:
    class Full:
        async def generate_step(self, prompts: list[Any], partials: list[str], requests: list[Any]) -> list[str]:
            return [
                str(each.temperature) if not partial else "" for each, partial in zip(requests, partials, strict=True)
            ]

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Full(), clock=clock) as batcher:
            assert (await batcher.add_request(InferenceRequest("p", temperature=0.5))).output == "0.5"

    play(main)


def test_a_model_that_never_waits_lets_others_come_and_go() -> None:
    class Quick(Steps):
        async def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> list[str]:
            self.steps.append(list(prompts))
            return ["x "] * len(prompts)

    async def main(clock: ManualClock) -> None:
        model = Quick()
        async with ContinuousBatcher(model, clock=clock) as batcher:
            endless = asyncio.create_task(batcher.add_request(request("endless:1", max_tokens=10**9), priority=9))
            response = await batcher.add_request(request("short:1", max_tokens=3))
            assert response.tokens_generated == 3
            endless.cancel()

    play(main)


def test_a_closed_loop_of_callers_leaves_no_slot_empty() -> None:
    async def main(clock: ManualClock) -> None:
        model = Steps()
        async with ContinuousBatcher(model, 4, clock=clock) as batcher:

            async def caller(number: int) -> None:
                for length in range(1, 6):
                    await batcher.add_request(f"x:{(length * number) % 7 + 1}")

            await asyncio.gather(*map(caller, range(4)))
        busy = [len(step) for step in model.steps]
        assert busy == sorted(busy, reverse=True)

    play(main)


def test_a_blocking_model_runs_in_a_thread_also_without_an_event_loop() -> None:
    class Blocking:
        def __init__(self) -> None:
            self.threads: set[str] = set()

        def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> list[str]:
            self.threads.add(threading.current_thread().name)
            tokens = [[*tokens_of(prompt), ""] for prompt in prompts]
            return [each[output.count(" ")] for each, output in zip(tokens, partial_outputs, strict=True)]

    model = Blocking()
    with ContinuousBatcher(model) as batcher:
        futures = [batcher.submit(f"x:{n}") for n in range(1, 4)]
        assert [future.result().tokens_generated for future in futures] == [1, 2, 3]

        async def elsewhere() -> list[str]:
            return [piece async for piece in batcher.stream("y:2")]

        assert asyncio.run(elsewhere()) == ["y0 ", "y1 "]
    assert all(name.startswith("batchwright-model") for name in model.threads)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="generate_step"):
        ContinuousBatcher(5)  # type: ignore[arg-type]
    for setting in ("max_batch_size", "max_sequence_length", "max_waiting", "max_waiting_tokens"):
        with pytest.raises(ValueError, match=f"{setting}=0"):
            ContinuousBatcher(Steps(), **{setting: 0})  # type: ignore[arg-type]


def test_many_short_requests_leave_nothing_behind() -> None:
    class Quick:
        async def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> list[str]:
            return ["" if output else "token " for output in partial_outputs]

    def run(batcher: ContinuousBatcher, callers: int, each: int) -> None:
        async def caller() -> None:
            for _ in range(each):
                await batcher.add_request(shared)

        async def main() -> None:
            await asyncio.gather(*(caller() for _ in range(callers)))

        asyncio.run(main())

    shared = InferenceRequest("x", deadline=1e6)
    batcher = ContinuousBatcher(Quick())
    run(batcher, 32, 30)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run(batcher, 32, 300)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert batcher.stats().succeeded == 32 * 330
    assert grown < 64_000


def test_over_a_model_that_streams_batches_free_slots_get_a_batch_of_their_own() -> None:
    async def main(clock: ManualClock) -> None:
        model = Streams()
        async with ContinuousBatcher(model, 2, clock=clock) as batcher:
            responses = await asyncio.gather(*map(batcher.add_request, ["a:1", "b:4", "c:2", "d:1"]))
        assert [response.output for response in responses] == ["a0 ", "b0 b1 b2 b3 ", "c0 c1 ", "d0 "]
        assert model.batches == [["a:1", "b:4"], ["c:2"], ["d:1"]]
        # The first cannot know yet that None is the end; its slot is given on at once.
        assert [response.latency_ms for response in responses] == [4000.0, 4000.0, 4000.0, 5000.0]
        assert model.open == 0

    play(main)


def test_a_plain_generator_is_run_in_a_thread() -> None:
    class Plain:
        def generate_stream_batch(self, prompts: list[str]) -> Any:
            for i in range(3):
                yield [f"{prompt}{i}" for prompt in prompts]

    with ContinuousBatcher(Plain()) as batcher:
        assert [batcher.submit(name).result().output for name in ("a", "b")] == ["a0a1a2", "b0b1b2"]


def test_over_an_engine_it_gives_what_the_engine_gives(shallow_path: Path) -> None:
    from batchwright import AsyncEngine, Engine, SamplingParams

    params = SamplingParams(max_tokens=6, temperature=0.0)
    prompts = ["Once upon a time", "The capital of France is", "1, 2, 3,"]
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "50MB", "max_model_len": 128}
    own = Engine(shallow_path, **options)
    expected = [(each.output, each.token_ids) for each in own.generate(prompts, params)]

    async def main() -> None:
        told: list[InferenceResponse] = []
        with pytest.raises(ValueError, match="max_sequence_length=7"):
            ContinuousBatcher(own, max_sequence_length=7)
        async with AsyncEngine(own) as engine:
            async with ContinuousBatcher(engine, max_sequence_length=128) as batcher:
                requests = [InferenceRequest.of(prompt, params, callback=told.append) for prompt in prompts]
                responses = await asyncio.gather(*map(batcher.add_request, requests))
                assert [(each.output, each.token_ids) for each in responses] == expected
                assert {each.request_id for each in told} == {each.request_id for each in requests}
                pieces = [piece async for piece in batcher.stream(InferenceRequest.of(prompts[0], params))]
                assert "".join(pieces) == expected[0][0]
                with pytest.raises(ContextLengthExceeded):
                    await batcher.add_request(InferenceRequest("x", max_tokens=1000))
                late = await batcher.add_request(InferenceRequest("x", max_tokens=100, ignore_eos=True), deadline=1e-6)
                assert isinstance(late.error, DeadlineExceeded)
                gone = asyncio.create_task(batcher.add_request(InferenceRequest("x", max_tokens=100)))
                await asyncio.sleep(0)
                gone.cancel()
                stats = batcher.stats()
                assert (stats.succeeded, stats.expired, stats.failed, stats.requests) == (4, 1, 1, 7)
                assert stats.occupancy > 1
                assert stats.ttft_ms.count == 4
            # It was given, so it is still there.
            assert (await engine.generate(prompts[0], params)).output == expected[0][0]
            with pytest.raises(ValueError, match="max_batch_size=7"):
                ContinuousBatcher(engine, 7)
            with pytest.raises(ValueError, match="order"):
                ContinuousBatcher(engine, order=Fifo())

    asyncio.run(main())


def test_an_engine_belongs_to_the_batcher_that_it_is_given_to(shallow_path: Path) -> None:
    from batchwright import Engine
    from batchwright.errors import EngineClosed

    engine = Engine(shallow_path, kv_memory="50MB", max_model_len=64)
    with ContinuousBatcher(engine) as batcher:
        assert batcher.submit(InferenceRequest("1, 2, 3,", max_tokens=2)).result().tokens_generated == 2
    with pytest.raises(EngineClosed):
        engine.generate("x")


def test_a_name_is_enough(shallow_path: Path) -> None:
    with ContinuousBatcher(shallow_path, 4, 64) as batcher:
        assert batcher.submit(InferenceRequest("1, 2, 3,", max_tokens=2)).result().tokens_generated == 2
        with pytest.raises(ContextLengthExceeded):
            batcher.submit(InferenceRequest("x", max_tokens=64)).result()


class _Counts:
    """Gives as its next token what it was given, three times."""

    async def generate_step(self, prompts: list[str], partial_outputs: list[list[str]]) -> list[str]:
        assert all(type(each) is list for each in partial_outputs)
        return [f"{each!r};" if len(each) < 3 else "" for each in partial_outputs]


class _Unannotated:
    async def generate_step(self, prompts, partial_outputs):  # type: ignore[no-untyped-def]
        return ["t" if len(each) < 2 else "" for each in partial_outputs]


class _Texts:
    async def generate_step(self, prompts: list[str], partial_texts: Any) -> list[str]:
        return [f"{each!r};" if len(each) < 9 else "" for each in partial_texts]


class _Annotated:
    async def generate_step(self, prompts: list[str], partial_outputs: Sequence[str]) -> list[str]:
        return [f"{each!r};" if len(each) < 9 else "" for each in partial_outputs]


def test_a_step_gets_the_tokens_so_far_or_their_text_where_it_says_so() -> None:
    async def main(clock: ManualClock) -> None:
        outputs = []
        for model in (_Counts(), _Unannotated(), _Texts(), _Annotated()):
            async with ContinuousBatcher(model, clock=clock) as batcher:
                outputs.append((await batcher.add_request("x")).output)
        assert outputs[0].startswith("[];['[];'];")
        assert outputs[1] == "tt"
        assert outputs[2] == outputs[3]
        assert outputs[2].startswith("'';\"'';\";")

    play(main)


def test_a_step_may_do_what_it_likes_with_its_lists() -> None:
    class Spoils:
        async def generate_step(self, prompts: list[str], partial_outputs: list[list[str]]) -> list[str]:
            tokens = ["" if len(each) == 2 else str(len(each)) for each in partial_outputs]
            for each in partial_outputs:
                each.clear()
            return tokens

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Spoils(), clock=clock) as batcher:
            assert (await batcher.add_request("x")).output == "01"

    play(main)
