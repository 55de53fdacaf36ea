"""What becomes of requests when the model, the policy, a tokenizer or a callback fails: nobody else is concerned."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from batchwright import InferenceRequest, InferenceResponse, Usage
from batchwright.batcher import Batcher, WrongOutputs
from batchwright.clock import ManualClock
from batchwright.errors import GenerationError
from batchwright.policies import Backlog, BySize, Dispatch, Item, Policy, Wait

from .virtual import Model, at, outcome, play


class _Poisoned(Model):
    """Raises for a batch with "bad" in it, and returns an error for "odd"."""

    async def generate_batch(self, prompts: Any) -> list[Any]:
        outputs = await super().generate_batch(prompts)
        if "bad" in prompts:
            raise ZeroDivisionError("bad prompt")
        return outputs

    def answer(self, prompt: Any) -> Any:
        return KeyError("odd") if prompt == "odd" else prompt.upper()


def test_only_the_poisoned_request_of_a_batch_that_raises_fails() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(_Poisoned(), clock=clock) as batcher:
            responses = await asyncio.gather(*(batcher.add_request(p) for p in ["a", "b", "bad", "c", "d", "e"]))
        assert [response.output for response in responses] == ["A", "B", "", "C", "D", "E"]
        error = responses[2].error
        assert isinstance(error, GenerationError)
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert "ZeroDivisionError: bad prompt" in str(error)
        assert responses[2].finish_reason == "error"
        stats = batcher.stats()
        assert (stats.succeeded, stats.failed, stats.batches, stats.splits) == (5, 1, 6, 2)

    play(main)


def test_those_who_wait_do_not_wait_for_the_search_in_a_failed_batch() -> None:
    async def main(clock: ManualClock) -> None:
        model = _Poisoned()
        async with Batcher(model, Policy(BySize(4)), clock=clock) as batcher:
            suspects = [asyncio.create_task(batcher.compute(p)) for p in ["a", "bad", "c", "d"]]
            fresh = [asyncio.create_task(at(0.5 + i, batcher.compute(f"fresh {i}"))) for i in range(8)]
            await asyncio.gather(*fresh)
            # One part of the failed batch went between, and no more while others waited.
            assert model.batches[:3] == [["a", "bad", "c", "d"], ["a", "bad"], ["fresh 0", "fresh 1"]]
            assert clock.now() == 9.0
            words = await asyncio.gather(*suspects, return_exceptions=True)
        assert [words[0], *words[2:]] == ["A", "C", "D"]
        assert isinstance(words[1], ZeroDivisionError)
        reasons = batcher.stats().reasons
        assert reasons["retry"] == len(model.batches) - reasons["idle"] - reasons["full"]

    play(main)


def test_a_suspect_that_would_be_late_is_answered_and_not_computed_again() -> None:
    async def main(clock: ManualClock) -> None:
        model = _Poisoned()
        async with Batcher(model, clock=clock) as batcher:
            assert await batcher.compute("first") == "FIRST"
            prompts = ["a", "bad", "c", "d"]
            words = await asyncio.gather(*(outcome(batcher, p, deadline=2.5) for p in prompts))
            assert list(words) == ["DeadlineExceeded"] * 4
            assert model.batches[1:] == [prompts, ["a", "bad"]]
            assert clock.now() == 3.0

    play(main)


def test_suspects_take_up_the_queue_like_all_who_wait() -> None:
    class Down(Model):
        async def generate_batch(self, prompts: Any) -> list[Any]:
            await super().generate_batch(prompts)
            raise ConnectionError("down")

    async def main(clock: ManualClock) -> None:
        batcher = Batcher(Down(), Policy(BySize(8)), max_waiting=20, clock=clock)
        calls, most = [], 0
        for number in range(200):
            calls.append(asyncio.create_task(outcome(batcher, str(number))))
            await asyncio.sleep(0.2)
            stats = batcher.stats()
            most = max(most, stats.waiting + stats.running)
        # Beside one batch in the model.
        assert most <= 20 + 8
        await batcher.close(drain=False)
        words = Counter(await asyncio.gather(*calls))
        assert words["refused: Overloaded"] == batcher.stats().overloaded > 0
        assert words.total() == 200

    play(main)


def test_closing_at_once_answers_the_suspects_too() -> None:
    async def main(clock: ManualClock) -> None:
        batcher = Batcher(_Poisoned(), clock=clock)
        calls = [asyncio.create_task(outcome(batcher, p)) for p in ["a", "bad", "c", "d"]]
        await asyncio.sleep(1.5)
        await batcher.close(drain=False)
        assert await asyncio.gather(*calls) == ["BatcherClosed"] * 4

    play(main)


def test_without_isolation_a_batch_that_raises_is_computed_once() -> None:
    async def main(clock: ManualClock) -> None:
        model = _Poisoned()
        async with Batcher(model, isolate_failures=False, clock=clock) as batcher:
            words = await asyncio.gather(*(outcome(batcher, p) for p in ["a", "bad", "c"]))
        assert words == ["GenerationError"] * 3
        assert len(model.batches) == 1

    play(main)


def test_an_exception_among_the_outputs_fails_that_item_alone() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(_Poisoned(), clock=clock) as batcher:
            assert await asyncio.gather(*(outcome(batcher, p) for p in ["a", "odd", "c"])) == [
                "A",
                "GenerationError",
                "C",
            ]
            with pytest.raises(KeyError, match="odd"):
                await batcher.compute("odd")

    play(main)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([], "0 outputs for a batch of 1"),
        (["one", "two", "three"], "3 outputs for a batch of 1"),
        (None, "NoneType"),
        ("a", "returned str"),
        ({"a": 1}, "returned dict"),
    ],
)
def test_outputs_that_are_no_list_with_one_for_each_prompt_are_an_error(result: Any, words: str) -> None:
    async def model(prompts: list[Any]) -> Any:
        return result

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, clock=clock) as batcher:
            responses = await asyncio.gather(batcher.add_request("a"), batcher.add_request("b"))
        for response in responses:
            assert isinstance(response.error, WrongOutputs)
            assert words in str(response.error)

    play(main)


def test_only_the_request_for_which_the_model_returns_nothing_fails() -> None:
    async def model(prompts: list[str]) -> list[str]:
        return [prompt.upper() for prompt in prompts if prompt]

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, clock=clock) as batcher:
            assert await asyncio.gather(*(outcome(batcher, p) for p in ("a", "", "b", "c"))) == [
                "A",
                "WrongOutputs",
                "B",
                "C",
            ]

    play(main)


def test_a_model_that_is_cancelled_inside_fails_and_hangs_nobody() -> None:
    async def model(prompts: list[Any]) -> Any:
        raise asyncio.CancelledError

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, clock=clock) as batcher:
            assert await outcome(batcher, "a") == "GenerationError"
            with pytest.raises(GenerationError):
                await batcher.compute("a")

    play(main)


def test_a_model_that_hangs_is_given_up_at_the_deadline_and_the_next_request_is_served() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1e6)
        async with Batcher(model, clock=clock) as batcher:
            words = await asyncio.gather(outcome(batcher, "a", deadline=2.0), outcome(batcher, "b", deadline=3.0))
            assert list(words) == ["DeadlineExceeded"] * 2
            assert clock.now() == 3.0
            model.base = 1.0
            assert await outcome(batcher, "c") == "C"

    play(main)


def test_a_policy_that_fails_leaves_nobody_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Policy):
        def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
            if now < 1.0:
                raise ArithmeticError("lost")
            return super().decide(waiting, now)

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), Faulty(BySize(2)), clock=clock) as batcher:
            words = await asyncio.gather(*(outcome(batcher, "x") for _ in range(5)))
            assert list(words) == ["GenerationError"] * 5
            assert await at(2.0, outcome(batcher, "y")) == "Y"

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


@pytest.mark.parametrize("drain", [True, False])
def test_a_policy_that_fails_to_place_requests_answers_them(caplog: pytest.LogCaptureFixture, drain: bool) -> None:
    class Faulty(Policy):
        def place(self, items: Sequence[Item]) -> None:
            if any(1.0 < item.arrival < 3.0 for item in items):
                raise ArithmeticError("lost")
            super().place(items)

    async def main(clock: ManualClock) -> None:
        batcher = Batcher(Model(), Faulty(BySize(2)), clock=clock)
        assert await outcome(batcher, "a") == "A"
        calls = [asyncio.create_task(at(2.0, outcome(batcher, "x"))) for _ in range(3)]
        calls.append(asyncio.create_task(at(2.0, outcome(batcher, "x", deadline=0.5))))
        await at(2.0, asyncio.sleep(0))
        if drain:
            assert await at(4.0, outcome(batcher, "y")) == "Y"
        await batcher.close(drain=drain)
        assert await asyncio.gather(*calls) == ["GenerationError"] * 3 + ["refused: ArithmeticError"]

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


@pytest.mark.parametrize("fault", ["served", "twice", "foreign", "empty", None])
def test_a_policy_that_fails_with_its_decision_loses_nobody(
    fault: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(Policy):
        def served(self, batch: Sequence[Item]) -> None:
            if fault == "served":
                raise ArithmeticError("lost")

        def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
            items = waiting.items
            chosen = {"twice": [items[0], items[0]], "foreign": [Item(0.0)], "empty": []}.get(fault or "", items)
            return Dispatch(chosen, "a reason of its own")  # type: ignore[arg-type]

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), Faulty(BySize(2)), clock=clock) as batcher:
            words = set(await asyncio.gather(*(outcome(batcher, "x") for _ in range(5))))
        assert words == ({"GenerationError"} if fault else {"X"})

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


def test_a_policy_that_cannot_let_go_disturbs_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Policy):
        def removed(self, item: Item) -> None:
            raise ArithmeticError

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(5.0), Faulty(BySize(1)), clock=clock) as batcher:
            first = asyncio.create_task(outcome(batcher, "first"))
            await asyncio.sleep(0)
            words = await asyncio.gather(*(outcome(batcher, "x", deadline=1.0 + i) for i in range(3)))
            assert (words, clock.now()) == (["DeadlineExceeded"] * 3, 3.0)
            assert await first == "FIRST"

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


def test_a_policy_that_ignores_draining_does_not_keep_the_batcher_open(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Policy):
        def decide(self, waiting: Backlog, now: float) -> Dispatch | Wait:
            return Wait(math.inf)

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), Stubborn(BySize(1)), clock=clock) as batcher:
            call = asyncio.create_task(outcome(batcher, "x"))
            await asyncio.sleep(1)
        assert await call == "GenerationError"

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


def test_callbacks_are_called_once_and_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def callback(response: InferenceResponse) -> None:
        told.append(response.output)
        raise RuntimeError("not the caller's business")

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            requests = [InferenceRequest(word, callback=callback) for word in ("a", "b")]
            responses = await asyncio.gather(*(batcher.add_request(request) for request in requests))
        assert [response.output for response in responses] == ["A", "B"]

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)
    assert told == ["A", "B"]


def test_a_tokenizer_that_fails_on_an_output_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Picky:
        def encode(self, text: str) -> list[int]:
            if text.isupper():
                raise UnicodeError
            return [0]

    async def main(clock: ManualClock) -> None:
        model = Model()
        model.tokenizer = Picky()  # type: ignore[attr-defined]
        async with Batcher(model, clock=clock) as batcher:
            response = await batcher.add_request("word")
        assert (response.output, response.tokens_generated, response.usage) == ("WORD", 0, Usage(1, 0))

    with caplog.at_level(logging.CRITICAL, logger="batchwright.batcher"):
        play(main)


def test_a_tokenizer_that_fails_refuses_that_request_alone() -> None:
    def length(prompt: str) -> int:
        return 1 if prompt == "good" else len(None)  # type: ignore[arg-type]

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), length=length, clock=clock) as batcher:
            words = await asyncio.gather(outcome(batcher, "good"), outcome(batcher, "bad"))
        assert list(words) == ["GOOD", "refused: InvalidRequest"]

    play(main)


def test_a_response_with_an_error_is_a_failure() -> None:
    class Answering:
        async def generate_batch(self, prompts: list[Any], requests: list[InferenceRequest]) -> list[Any]:
            error = GenerationError("no")
            return [InferenceResponse("", "", 0, 0.0, 0.0, "error", Usage(1, 0), error=error) for _ in prompts]

    async def main(clock: ManualClock) -> None:
        async with Batcher(Answering(), clock=clock) as batcher:
            assert await outcome(batcher, "x") == "GenerationError"
        assert (batcher.stats().succeeded, batcher.stats().failed) == (0, 1)

    play(main)
