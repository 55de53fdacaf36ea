"""Token by token: who is in which step, how sequences end, and who is told what."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import tracemalloc
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from batchwright import InferenceRequest, InferenceResponse, InvalidRequest, Usage
from batchwright.batcher import ContinuousBatcher, WrongOutputs
from batchwright.clock import ManualClock
from batchwright.errors import (
    BatcherClosed,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationError,
    Overloaded,
)
from batchwright.policies import Fifo

from .tokens import Steps, Streams, gather, request, tokens_of
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
        async with ContinuousBatcher(Steps(), max_sequence_length=6, clock=clock) as batcher:
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


class _Faulty(Steps):
    """Raises for a step with "bad" at its second token, gives an error for "odd", a number for "number"."""

    def token(self, prompt: str, output: str) -> Any:
        if output and prompt.startswith("bad"):
            raise ZeroDivisionError("bad prompt")
        if output and prompt.startswith("odd"):
            return KeyError("odd")
        return 5 if output and prompt.startswith("number") else super().token(prompt, output)


def test_only_the_poisoned_sequence_of_a_step_fails_with_the_text_that_there_was() -> None:
    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(_Faulty(), clock=clock) as batcher:
            prompts = ["a:3", "bad:3", "odd:3", "b:3", "number:3", "c:3"]
            responses = await asyncio.gather(*map(batcher.add_request, prompts))
        for prompt, response in zip(prompts, responses, strict=True):
            name = prompt[:-2]
            if len(name) == 1:
                assert (response.error, response.output) == (None, "".join(tokens_of(prompt)))
            else:
                assert isinstance(response.error, GenerationError)
                assert (response.output, response.tokens_generated) == (f"{name}0 ", 1)
                assert response.finish_reason == "error"
        assert isinstance(responses[1].error, GenerationError)
        assert isinstance(responses[1].error.__cause__, ZeroDivisionError)
        assert isinstance(responses[4].error, WrongOutputs)
        stats = batcher.stats()
        assert (stats.succeeded, stats.failed, stats.splits) == (3, 3, 3)

    play(main)


def test_without_isolation_a_step_that_raises_fails_all_that_are_in_it() -> None:
    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(_Faulty(), isolate_failures=False, clock=clock) as batcher:
            responses = await asyncio.gather(*map(batcher.add_request, ["a:3", "bad:3"]))
        assert [response.output for response in responses] == ["a0 ", "bad0 "]
        assert all(response.error is not None for response in responses)

    play(main)


@pytest.mark.parametrize("result", [["one"], ["one", "two", "three"], None, "ab"])
def test_a_wrong_number_of_tokens_is_an_error_for_the_sequences_of_that_step(result: Any) -> None:
    class Short(Steps):
        async def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> Any:
            tokens = await super().generate_step(prompts, partial_outputs)
            return result if len(prompts) == 2 else tokens

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Short(), 2, clock=clock) as batcher:
            responses = await asyncio.gather(*map(batcher.add_request, ["a:1", "b:1", "c:1"]))
        assert [type(response.error) for response in responses] == [WrongOutputs, WrongOutputs, type(None)]

    play(main)


def test_a_model_that_is_cancelled_inside_fails_and_hangs_nobody() -> None:
    class Quits(Steps):
        def token(self, prompt: str, output: str) -> Any:
            raise asyncio.CancelledError

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Quits(), clock=clock) as batcher:
            assert isinstance((await batcher.add_request("a:1")).error, GenerationError)

    play(main)


def test_a_cancelled_caller_frees_its_slot_before_the_next_step() -> None:
    async def main(clock: ManualClock) -> None:
        model, told = Steps(), list[InferenceResponse]()
        async with ContinuousBatcher(model, 1, clock=clock) as batcher:
            gone = asyncio.create_task(batcher.add_request(request("gone:9", callback=told.append)))
            waits = asyncio.create_task(batcher.add_request("waits:1"))
            stays = asyncio.create_task(batcher.add_request("stays:1"))
            await asyncio.sleep(1.5)
            gone.cancel()
            waits.cancel()
            assert (await stays).queue_ms == 1500.0
        assert model.steps == [["gone:9"], ["gone:9"], ["stays:1"], ["stays:1"]]
        assert isinstance(told[0].error, Cancelled)
        assert (told[0].output, told[0].finish_reason) == ("gone0 ", "cancelled")
        assert batcher.stats().cancelled == 2

    play(main)


def test_a_step_that_is_still_wanted_goes_on_when_others_of_it_leave() -> None:
    async def main(clock: ManualClock) -> None:
        model = Steps()
        async with ContinuousBatcher(model, clock=clock) as batcher:
            gone = asyncio.create_task(batcher.add_request("gone:9"))
            stays = asyncio.create_task(batcher.add_request("stays:1"))
            await asyncio.sleep(0.5)
            gone.cancel()
            assert (await stays).latency_ms == 2000.0
        assert model.steps == [["gone:9", "stays:1"], ["stays:1"]]

    play(main)


def test_a_deadline_is_kept_in_the_queue_and_in_a_model_that_hangs_and_gives_the_text_that_there_was() -> None:
    async def main(clock: ManualClock) -> None:
        model = Steps()
        async with ContinuousBatcher(model, 1, clock=clock) as batcher:
            running = asyncio.create_task(batcher.add_request("runs:99", deadline=3.5))
            late = await at(0.5, batcher.add_request(request("waits:9", deadline=1.5)))
            assert (clock.now(), late.output, late.finish_reason) == (2.0, "", "error")
            assert isinstance(late.error, DeadlineExceeded)
            assert "in the queue" in str(late.error)
            model.base = 1e6
            late = await running
            assert (clock.now(), late.output, late.tokens_generated) == (3.5, "runs0 runs1 ", 2)
            assert "in the model" in str(late.error)
            model.base = 1.0
            assert (await batcher.add_request("next:1")).latency_ms == 2000.0
        assert batcher.stats().expired == 2

    play(main)


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Steps(), 2, max_waiting=2, max_waiting_tokens=10, clock=clock) as batcher:
            tasks = [asyncio.create_task(batcher.add_request("x:1")) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="limit is 10") as unknown:
                await batcher.add_request("long-name:1")
            assert unknown.value.retry_after is None
            tasks.append(asyncio.create_task(batcher.add_request("x:1")))
            await asyncio.sleep(0.5)
            assert (batcher.stats().waiting, batcher.stats().running) == (2, 2)
            with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
                await batcher.add_request("x:1")
            await asyncio.sleep(2)
            tasks += [asyncio.create_task(batcher.add_request("x:1")) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="try again in") as known:
                await batcher.add_request("x:1")
            # Each takes 2 s in its slot, and as many wait as there are slots.
            assert known.value.retry_after == pytest.approx(2.0)
            await asyncio.gather(*tasks)
        assert batcher.stats().overloaded == 3

    play(main)


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


def test_a_stream_gives_tokens_as_they_come_and_raises_what_goes_wrong() -> None:
    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(_Faulty(), clock=clock) as batcher:
            seen = [(clock.now(), token) async for token in batcher.stream("a:2")]
            assert seen == [(1.0, "a0 "), (2.0, "a1 ")]
            tokens: list[str] = []
            with pytest.raises(GenerationError, match="bad prompt"):
                await gather(batcher.stream("bad:3"), tokens)
            assert tokens == ["bad0 "]
            with pytest.raises(InvalidRequest):
                await gather(batcher.stream([]), tokens)

    play(main)


def test_leaving_a_stream_early_cancels_its_request() -> None:
    async def main(clock: ManualClock) -> None:
        model = Steps()
        async with ContinuousBatcher(model, clock=clock) as batcher:
            async with aclosing(batcher.stream("a:99")) as tokens:
                async for token in tokens:
                    if token == "a2 ":
                        break
            assert batcher.stats().cancelled == 1
            assert batcher.stats().running == 0
        assert len(model.steps) <= 4

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


def test_shutting_down_without_draining_answers_although_the_model_hangs() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Hanging:
        def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> list[str]:
            begun.set()
            may_end.wait()
            return [""] * len(prompts)

    batcher = ContinuousBatcher(Hanging())
    running = batcher.submit("a")
    begun.wait()
    batcher.shutdown(drain=False)
    assert isinstance(running.result().error, BatcherClosed)
    may_end.set()


def test_a_loop_that_ends_leaves_nothing_behind_for_the_next() -> None:
    batcher = ContinuousBatcher(Steps(base=0.0))

    async def leaves() -> None:
        task = asyncio.create_task(batcher.add_request(request("x:1", max_tokens=5)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leaves())
    assert asyncio.run(batcher.add_request("y:1")).output == "y0 "
    batcher.shutdown()


def test_an_order_that_fails_leaves_nobody_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Lost(Fifo):
        def served(self, batch: Any) -> None:
            raise ArithmeticError("lost")

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Steps(), order=Lost(), clock=clock) as batcher:
            responses = await asyncio.gather(*(batcher.add_request("x:1") for _ in range(3)))
        assert all(isinstance(response.error, GenerationError) for response in responses)

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


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
        assert [response.latency_ms for response in responses] == [2000.0, 4000.0, 4000.0, 5000.0]
        assert model.open == 0

    play(main)


def test_streams_that_go_wrong() -> None:
    class Odd(Streams):
        async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
            if "early:2" in prompts:
                raise ZeroDivisionError
            async with aclosing(super().generate_stream_batch(prompts)) as lists:
                async for tokens in lists:
                    yield tokens[:-1] if "short:2" in prompts else tokens
                    if "late:2" in prompts:
                        raise ZeroDivisionError

    async def main(clock: ManualClock) -> None:
        async def outputs(*prompts: str) -> list[tuple[str, str]]:
            model = Odd()
            async with ContinuousBatcher(model, clock=clock) as batcher:
                responses = await asyncio.gather(*map(batcher.add_request, prompts))
            assert model.open == 0
            return [(each.output, type(each.error).__name__) for each in responses]

        fine = [("a0 ", "NoneType"), ("b0 b1 ", "NoneType")]
        assert await outputs("a:1", "early:2", "b:2") == [fine[0], ("", "GenerationError"), fine[1]]
        assert await outputs("a:1", "late:2") == [("a0 ", "GenerationError"), ("late0 ", "GenerationError")]
        assert await outputs("a:1", "short:2") == [("", "WrongOutputs")] * 2

    play(main)


def test_a_stream_that_nobody_wants_is_closed() -> None:
    async def main(clock: ManualClock) -> None:
        model = Streams()
        async with ContinuousBatcher(model, 1, clock=clock) as batcher:
            late = await batcher.add_request("late:99", deadline=2.5)
            assert (late.output, model.open) == ("late0 late1 ", 1)
            gone = asyncio.create_task(batcher.add_request("gone:99"))
            await asyncio.sleep(1)
            gone.cancel()
            assert (await batcher.add_request(request("cut:99", max_tokens=2))).finish_reason == "length"
        await asyncio.sleep(0)
        assert model.open == 0

    play(main)


def test_a_plain_generator_is_run_in_a_thread() -> None:
    class Plain:
        def generate_stream_batch(self, prompts: list[str]) -> Any:
            for i in range(3):
                yield [f"{prompt}{i}" for prompt in prompts]

    with ContinuousBatcher(Plain()) as batcher:
        assert [batcher.submit(name).result().output for name in ("a", "b")] == ["a0a1a2", "b0b1b2"]


def test_over_an_engine_it_gives_what_the_engine_gives(smollm2_path: Path) -> None:
    from batchwright import AsyncEngine, Engine, SamplingParams

    params = SamplingParams(max_tokens=6, temperature=0.0)
    prompts = ["Once upon a time", "The capital of France is", "1, 2, 3,"]
    options: dict[str, Any] = {"dtype": "float32", "kv_memory": "50MB", "max_model_len": 128}
    own = Engine(smollm2_path, **options)
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


def test_an_engine_belongs_to_the_batcher_that_it_is_given_to(smollm2_path: Path) -> None:
    from batchwright import Engine
    from batchwright.errors import EngineClosed

    engine = Engine(smollm2_path, kv_memory="50MB", max_model_len=64)
    with ContinuousBatcher(engine) as batcher:
        assert batcher.submit(InferenceRequest("1, 2, 3,", max_tokens=2)).result().tokens_generated == 2
    with pytest.raises(EngineClosed):
        engine.generate("x")


def test_a_name_is_enough(smollm2_path: Path) -> None:
    with ContinuousBatcher(smollm2_path, 4, 64) as batcher:
        assert batcher.submit(InferenceRequest("1, 2, 3,", max_tokens=2)).result().tokens_generated == 2
        with pytest.raises(ContextLengthExceeded):
            batcher.submit(InferenceRequest("x", max_tokens=64)).result()
