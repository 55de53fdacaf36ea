"""What simple batching code gets wrong, mistake by mistake, for every batcher to which it applies.

Mistakes of other parts are tested beside them:

- `least loaded` that is round-robin: `test_replicas.py`, a slow replica gets less.
- Sequences dropped when a packed row is full, separators returned as output, padding that truncates silently, writes an
  empty sequence wrongly on the left, or turns ids into floats; buckets that cut: `tests/padding/test_padding.py`.
- Priorities and starvation under every order: `tests/policies/test_orders.py`.
- A slow stream that holds back the others: `test_streaming.py`.
- Token-level batchers: `test_continuous.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import pytest

from batchwright import InferenceRequest, InferenceResponse
from batchwright.batcher import (
    AdaptiveBatcher,
    AsyncBatchConfig,
    AsyncBatchProcessor,
    Batcher,
    LengthAwareBatcher,
    MemoryEfficientBatcher,
    ParallelBatchProcessor,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.batcher.computation import RunningBatch
from batchwright.clock import ManualClock
from batchwright.errors import BatcherClosed, Cancelled, ContextLengthExceeded, DeadlineExceeded
from batchwright.policies import simple

from .virtual import Model, at, play

Made = Batcher | AsyncBatchProcessor | ParallelBatchProcessor
Make = Callable[[Any, ManualClock], Made]

BATCHERS: dict[str, Make] = {
    "SimpleBatcher": lambda model, clock: SimpleBatcher(model, 8, 100, clock=clock),
    "TimeBasedBatcher": lambda model, clock: TimeBasedBatcher(model, 50, 32, clock=clock),
    "AdaptiveBatcher": lambda model, clock: AdaptiveBatcher(model, clock=clock),
    "PriorityBatcher": lambda model, clock: PriorityBatcher(model, clock=clock),
    "LengthAwareBatcher": lambda model, clock: LengthAwareBatcher(model, 400, clock=clock),
    "MemoryEfficientBatcher": lambda model, clock: MemoryEfficientBatcher(model, 4, 1000, clock=clock),
    "Batcher": lambda model, clock: Batcher(model, clock=clock),
    "AsyncBatchProcessor": lambda model, clock: AsyncBatchProcessor(
        model, AsyncBatchConfig(max_concurrent_batches=1, timeout_seconds=1e3), clock=clock
    ),
    "ParallelBatchProcessor": lambda model, clock: ParallelBatchProcessor([model], clock=clock),
}
each_batcher = pytest.mark.parametrize("make", BATCHERS.values(), ids=BATCHERS)


def _ask(made: Made, request: Any, **options: Any) -> Awaitable[InferenceResponse]:
    return (made if isinstance(made, Batcher) else made.batcher).add_request(request, **options)


def _stats(made: Made) -> Any:
    return made.stats()


@each_batcher
def test_no_request_is_answered_none_because_the_batch_of_another_caller_carried_it(make: Make) -> None:
    async def main(clock: ManualClock) -> None:
        async with make(Model(), clock) as made:
            words = [f"word {n}" for n in range(50)]
            responses = await asyncio.gather(*(at(n % 7 * 0.3, _as_task(made, w)) for n, w in enumerate(words)))
        assert [response.output for response in responses] == [word.upper() for word in words]

    play(main)


async def _as_task(made: Made, request: Any, **options: Any) -> InferenceResponse:
    return await _ask(made, request, **options)


@each_batcher
def test_a_batch_that_never_fills_leaves_all_the_same(make: Make) -> None:
    """In virtual time who waits for ever is found at once: `Stuck` is raised."""

    async def main(clock: ManualClock) -> None:
        async with make(Model(), clock) as made:
            for count in (1, 3, 11):
                # Lengths of which none is like another, and a few at the end that fill nothing.
                words = ["x" * 3**n for n in range(count % 5)] + ["yy"] * (count - count % 5)
                responses = await asyncio.gather(*(_ask(made, word) for word in words))
                assert [response.output for response in responses] == [word.upper() for word in words]

    play(main)


@each_batcher
def test_it_goes_on_after_the_queue_was_empty(make: Make) -> None:
    async def main(clock: ManualClock) -> None:
        async with make(Model(base=0.25), clock) as made:
            for moment in (0.0, 10.0, 1e6):
                response = await at(moment, _as_task(made, "x"))
                assert (response.output, response.error) == ("X", None)
                assert response.latency_ms <= 350.0
                assert (_stats(made).waiting, _stats(made).running) == (0, 0)

    play(main)


def test_a_window_begins_with_its_first_request_and_is_not_reset_by_later_ones() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=0.25)
        async with TimeBasedBatcher(model, 1000, 32, clock=clock) as batcher:
            await asyncio.gather(*(at(moment, batcher.add_request("x")) for moment in (1.0, 1.5, 1.9375, 2.5)))
        assert list(zip(model.starts, map(len, model.batches), strict=True)) == [(2.0, 3), (3.5, 1)]
        assert batcher.stats().reasons == {"window": 2}

    play(main)


class Faulty(Model):
    """Raises with "raise" in the batch, gives nothing for "omit", and returns an exception for "return"."""

    async def generate_batch(self, prompts: Any) -> list[Any]:
        outputs = await super().generate_batch(prompts)
        if "raise" in prompts:
            raise ZeroDivisionError("bad prompt")
        return [output for output in outputs if output != "OMIT"]

    def answer(self, prompt: Any) -> Any:
        return KeyError("bad prompt") if prompt == "return" else prompt.upper()


@each_batcher
@pytest.mark.parametrize("bad", ["raise", "omit", "return"])
def test_one_bad_request_neither_fails_its_batch_nor_hangs_it(make: Make, bad: str) -> None:
    async def main(clock: ManualClock) -> None:
        async with make(Faulty(), clock) as made:
            responses = await asyncio.gather(*(_ask(made, word) for word in ("a", "b", bad, "c", "d")))
            assert [response.output for response in responses] == ["A", "B", "", "C", "D"]
            assert responses[2].error is not None
            assert (await _ask(made, "next")).output == "NEXT"
            assert (_stats(made).succeeded, _stats(made).failed) == (5, 1)

    play(main)


@each_batcher
def test_who_has_gone_is_not_computed(make: Make) -> None:
    async def main(clock: ManualClock) -> None:
        model, told = Model(base=100.0), list[InferenceResponse]()
        async with make(model, clock) as made:
            first = asyncio.ensure_future(_as_task(made, "first", deadline=150.0))
            await asyncio.sleep(1.0)
            assert len(model.batches) == 1
            gone = asyncio.ensure_future(_as_task(made, InferenceRequest("gone", callback=told.append)))
            late = asyncio.ensure_future(_as_task(made, "late", deadline=5.0))
            stays = asyncio.ensure_future(_as_task(made, InferenceRequest("stays")))
            await asyncio.sleep(1.0)
            gone.cancel()
            assert isinstance((await late).error, DeadlineExceeded)
            assert clock.now() == 6.0
            assert (await first).output == "FIRST"
            model.base = 1.0
            await stays
        assert model.batches == [["first"], ["stays"]]
        assert gone.cancelled()
        assert isinstance(told[0].error, Cancelled)
        assert (_stats(made).cancelled, _stats(made).expired) == (1, 1)

    play(main)


class Letters:
    """A tokenizer: one token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@each_batcher
def test_tokens_are_counted_by_the_tokenizer_or_estimated_as_a_quarter_of_the_characters(make: Make) -> None:
    async def main(clock: ManualClock) -> None:
        plain, counting = Model(), Model()
        counting.tokenizer = Letters()  # type: ignore[attr-defined]
        for model, tokens in ((plain, 3), (counting, 9)):
            async with make(model, clock) as made:
                response = await _ask(made, "two words")
            assert (response.tokens_generated, response.usage.prompt_tokens) == (tokens, tokens)
            assert response.usage.completion_tokens == tokens
            assert response.usage.is_estimate == (model is plain)

    play(main)


@each_batcher
def test_latency_is_measured_with_the_queue(make: Make) -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1.0)

        async def caller(moment: float) -> None:
            await asyncio.sleep(moment)
            sent = clock.now()
            response = await _ask(made, f"{moment}")
            begun = next(s for s, batch in zip(model.starts, model.batches, strict=True) if f"{moment}" in batch)
            assert response.latency_ms == pytest.approx((clock.now() - sent) * 1e3)
            assert response.queue_ms == pytest.approx((begun - sent) * 1e3)
            assert response.latency_ms == pytest.approx(response.queue_ms + 1e3)

        async with make(model, clock) as made:
            await asyncio.gather(*map(caller, (0.0, 0.3, 0.6, 2.0)))
            assert _stats(made).queue_ms.maximum >= 700.0

    play(main)


def test_within_a_priority_it_is_first_come_first_served_and_nothing_starves() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1.0)
        async with PriorityBatcher(model, 1, 0, clock=clock) as batcher:
            levels = [9, 5, 1, 5, 1, 9, 5]
            patient = asyncio.gather(
                *(batcher.add_request(f"{level}{n}", priority=level) for n, level in enumerate(levels))
            )
            await asyncio.sleep(0.5)
            # One a second, all that can be computed, and all of them more urgent.
            flood = [
                asyncio.ensure_future(at(0.5 + n, batcher.add_request(f"0{n + 10}", priority=0))) for n in range(120)
            ]
            await patient
            assert clock.now() < 120
            await asyncio.gather(*flood)
        served = [batch[0] for batch in model.batches]
        for level in "0159":
            own = [int(word[1:]) for word in served if word[0] == level]
            assert own == sorted(own)

    play(main)


@pytest.mark.parametrize("name", ["LengthAwareBatcher", "MemoryEfficientBatcher", "Batcher"])
def test_what_is_longer_than_usual_reaches_the_model_uncut(name: str) -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with BATCHERS[name](model, clock) as made:
            words = ["x" * n for n in (10, 12, 399, 400, 401, 3000)]
            responses = await asyncio.gather(*(_ask(made, word) for word in words))
        assert [len(response.output) for response in responses] == list(map(len, words))
        assert sorted((word for batch in model.batches for word in batch), key=len) == words

    play(main)


@each_batcher
def test_a_request_larger_than_the_whole_budget_goes_alone_or_is_refused_with_the_reason(make: Make) -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with make(model, clock) as made:
            others = asyncio.gather(*(_ask(made, "x" * 30) for _ in range(5)))
            await asyncio.sleep(0)
            if isinstance(made, MemoryEfficientBatcher):
                with pytest.raises(ContextLengthExceeded, match="max_memory_mb"):
                    await _ask(made, "y" * 20_000)
            else:
                assert (await _ask(made, "y" * 20_000)).output == "Y" * 20_000
            assert [response.output for response in await others] == ["X" * 30] * 5
        if isinstance(made, LengthAwareBatcher):
            assert ["y" * 20_000] in model.batches

    play(main)


@dataclass
class Closing:
    drain: bool
    answered: type[Exception] | None


@each_batcher
@pytest.mark.parametrize("closing", [Closing(True, None), Closing(False, BatcherClosed)], ids=["drain", "at once"])
def test_shutdown_answers_what_waits_and_what_runs(make: Make, closing: Closing) -> None:
    async def main(clock: ManualClock) -> None:
        made = make(Model(), clock)
        calls = [asyncio.ensure_future(_as_task(made, word)) for word in "abc"]
        await asyncio.sleep(0.5)
        calls += [asyncio.ensure_future(_as_task(made, word)) for word in "def"]
        await asyncio.sleep(0)
        await made.close(drain=closing.drain)
        responses = await asyncio.gather(*calls)
        if closing.answered is None:
            assert [response.output for response in responses] == list("ABCDEF")
        else:
            assert [type(response.error) for response in responses] == [closing.answered] * 6
            assert clock.now() == 0.5
        with pytest.raises(BatcherClosed):
            await _ask(made, "later")

    play(main)


def test_a_model_that_asks_its_own_batcher_gets_an_error() -> None:
    class Asks:
        batcher: Batcher

        async def generate_batch(self, prompts: list[str]) -> list[str]:
            return [await self.batcher.compute(prompt) for prompt in prompts]

    async def main(clock: ManualClock) -> None:
        model = Asks()
        async with Batcher(model, clock=clock) as model.batcher:
            with pytest.raises(RuntimeError, match="the model asked the batcher that it computes for"):
                await model.batcher.compute("hello")

    play(main)


def test_models_that_ask_each_others_batchers_get_an_error() -> None:
    async def main(clock: ManualClock) -> None:
        async def first(prompts: list[str]) -> list[str]:
            return [await b.compute(prompt) for prompt in prompts]

        async def second(prompts: list[str]) -> list[str]:
            return [await a.compute(prompt) for prompt in prompts]

        async with Batcher(first, clock=clock) as a, Batcher(second, clock=clock) as b:
            with pytest.raises(RuntimeError, match="the model asked the batcher that it computes for"):
                await a.compute("hello")

    play(main)


def test_what_is_remembered_of_the_batches_before_does_not_grow() -> None:
    sizes: list[int] = []

    async def model(prompts: list[str]) -> list[str]:
        kept = [value for value in copy_context().values() if isinstance(value, tuple)]
        sizes.append(sum(isinstance(each, RunningBatch) for value in kept for each in value))
        return prompts

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, simple(1, 0.0), clock=clock) as batcher:
            await asyncio.gather(*[batcher.compute(str(number)) for number in range(20)])

    play(main)
    assert sizes == [sizes[0]] * 20


def test_a_blocking_model_that_asks_its_own_batcher_gets_an_error() -> None:
    def model(prompts: list[str]) -> list[str]:
        return [batcher.submit_item(prompt).result(timeout=60) for prompt in prompts]

    with Batcher(model) as batcher, pytest.raises(RuntimeError, match="the model asked the batcher"):
        batcher.submit_item("hello").result(timeout=60)


def test_a_model_may_ask_another_batcher_and_what_it_starts_its_own_when_it_has_answered() -> None:
    later: list[asyncio.Task[str]] = []

    class Asks:
        batcher: Batcher
        other: Batcher

        async def generate_batch(self, prompts: list[str]) -> list[str]:
            async def ask_later() -> str:
                await asyncio.sleep(5.0)
                answer: str = await self.batcher.compute("later")
                return answer

            if "hello" in prompts:
                later.append(asyncio.create_task(ask_later()))
            return [await self.other.compute(prompt) for prompt in prompts]

    async def main(clock: ManualClock) -> None:
        model = Asks()
        async with Batcher(model, clock=clock) as model.batcher, Batcher(Model(), clock=clock) as model.other:
            assert await model.batcher.compute("hello") == "HELLO"
            assert await later[0] == "LATER"

    play(main)
