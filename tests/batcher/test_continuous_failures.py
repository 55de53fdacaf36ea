"""Token by token when something goes wrong: poisoned steps, cancelled callers, late ones, too many, an early end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from batchwright import InferenceResponse, InvalidRequest
from batchwright.batcher import ContinuousBatcher, WrongOutputs
from batchwright.clock import ManualClock
from batchwright.errors import (
    BatcherClosed,
    Cancelled,
    DeadlineExceeded,
    GenerationError,
    Overloaded,
)
from batchwright.policies import Fifo

from .tokens import Steps, Streams, gather, request, tokens_of
from .virtual import at, play


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
def test_a_wrong_number_of_tokens_is_isolated_like_any_failure_of_a_step(result: Any) -> None:
    class Short(Steps):
        async def generate_step(self, prompts: list[str], partial_outputs: list[str]) -> Any:
            tokens = await super().generate_step(prompts, partial_outputs)
            return result if len(prompts) == 2 else tokens

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Short(), 2, clock=clock) as batcher:
            responses = await asyncio.gather(*map(batcher.add_request, ["a:1", "b:1", "c:1"]))
        # Computed again in halves, which get as many tokens as they have sequences.
        assert [response.output for response in responses] == ["a0 ", "b0 ", "c0 "]
        assert all(response.error is None for response in responses)

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
        async with ContinuousBatcher(
            Steps(), 2, max_waiting=2, max_waiting_tokens=10, length=len, clock=clock
        ) as batcher:
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


@pytest.mark.parametrize("when", ["early", "late", "closed"])
def test_a_stream_that_means_to_end_the_program_fails_its_batch(when: str) -> None:
    class Ends(Streams):
        async def generate_stream_batch(self, prompts: list[str]) -> AsyncGenerator[list[Any]]:
            if when == "early" and "bad:2" in prompts:
                raise SystemExit
            try:
                async for tokens in super().generate_stream_batch(prompts):
                    yield tokens
                    if when == "late" and "bad:2" in prompts:
                        raise SystemExit
            finally:
                if when == "closed":
                    raise SystemExit

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Ends(), 2, clock=clock) as batcher:
            fine, bad = await asyncio.gather(*map(batcher.add_request, ["a:1", "bad:2"]))
            after = await batcher.add_request(request("b:2", max_tokens=1))
        # That None was its end was not certain yet.
        assert [type(fine.error), fine.output] == [type(None) if when == "early" else GenerationError, "a0 "]
        assert (after.error, after.output) == (None, "b0 ")
        if when != "closed":
            assert isinstance(bad.error, GenerationError)
            assert "SystemExit" in str(bad.error)

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
