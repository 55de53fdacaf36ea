"""Several copies of a model: who gets the next batch, and what happens to one that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.batcher import ParallelBatchProcessor
from batchwright.batcher.model import DEADLINES_PASSED
from batchwright.batcher.replicas import Replicas
from batchwright.clock import ManualClock
from batchwright.errors import DeadlineExceeded
from batchwright.request import InferenceResponse

from .virtual import Model, at, play


class Fallible(Model):
    """Fails while `broken`, and for a batch with "bad" in it."""

    broken = False

    async def generate_batch(self, prompts: Any) -> list[Any]:
        outputs = await super().generate_batch(prompts)
        if self.broken or "bad" in prompts:
            raise ConnectionError("no")
        return outputs


def test_a_slow_replica_gets_less_and_holds_nobody_back() -> None:
    async def main(clock: ManualClock) -> None:
        fast, slow = Model(base=1.0), Model(base=10.0)
        async with ParallelBatchProcessor([slow, fast], batch_size=1, clock=clock) as processor:
            await asyncio.gather(*(processor.submit("x") for _ in range(11)))
            assert clock.now() == 10.0
        assert (len(slow.batches), len(fast.batches)) == (1, 10)

    play(main)


def test_free_replicas_share_the_work() -> None:
    async def main(clock: ManualClock) -> None:
        models = [Model(base=1.0) for _ in range(3)]
        async with ParallelBatchProcessor(models, clock=clock) as processor:
            for _ in range(9):
                await processor.submit("x")
        assert [len(model.batches) for model in models] == [3, 3, 3]

    play(main)


def test_a_broken_replica_is_taken_out_its_batch_computed_elsewhere_and_it_is_tried_again() -> None:
    async def main(clock: ManualClock) -> None:
        good, bad = Fallible(base=0.125), Fallible(base=0.125)
        bad.broken = True
        async with ParallelBatchProcessor([bad, good], clock=clock) as processor:
            for moment in (0.0, 0.5, 1.0, 3.0, 5.0, 6.5):
                assert (await at(moment, processor.submit("x"))).output == "X"
            # At 0; out for 1 s; at 3; out for 2 s; at 5.125 it would be back, at 6.5 it is tried.
            assert bad.starts == [0.0, 3.0, 6.5]
            bad.broken = False
            assert (await at(20.0, processor.submit("x"))).output == "X"
            assert bad.starts[-1] == 20.0
            assert [replica.failures for replica in processor.replicas] == [3, 0]
            assert processor.stats().failed == 0

    play(main)


def test_a_poisoned_request_takes_no_replica_out() -> None:
    async def main(clock: ManualClock) -> None:
        async with ParallelBatchProcessor([Fallible(), Fallible()], clock=clock) as processor:
            responses = await asyncio.gather(*(processor.batcher.add_request(p) for p in ("a", "bad", "b")))
            assert [response.error is None for response in responses] == [True, False, True]
            assert processor.batcher._runner.slots == 2
            assert [replica.failures for replica in processor.replicas] == [0, 0]

    play(main)


def test_the_last_replica_stays_though_it_fails() -> None:
    async def main(clock: ManualClock) -> None:
        model = Fallible()
        model.broken = True
        async with ParallelBatchProcessor([model], clock=clock) as processor:
            assert (await processor.batcher.add_request("x")).error is not None
            model.broken = False
            assert (await processor.submit("x")).output == "X"

    play(main)


def test_what_waits_goes_when_a_replica_is_back() -> None:
    async def main(clock: ManualClock) -> None:
        slow, shaky = Fallible(base=100.0), Fallible(base=0.5)
        shaky.broken = True
        async with ParallelBatchProcessor([shaky, slow], batch_size=1, clock=clock) as processor:
            first = asyncio.create_task(processor.submit("first"))
            await asyncio.sleep(0.75)
            shaky.broken = False
            second = await processor.submit("second")
            # It failed at 0.5, and is back a second later.
            assert second.latency_ms == 1250.0
            await first

    play(main)


def test_blocking_replicas_work() -> None:
    async def main() -> None:
        def upper(prompts: list[str]) -> list[str]:
            return [prompt.upper() for prompt in prompts]

        async with ParallelBatchProcessor([upper, upper]) as processor:
            responses = await asyncio.gather(*(processor.submit("x") for _ in range(40)))
        assert {response.output for response in responses} == {"X"}

    asyncio.run(main())


def test_no_replica_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="models"):
        ParallelBatchProcessor([])


def test_concurrency_is_the_number_of_models() -> None:
    with pytest.raises(TypeError, match="give more models"):
        ParallelBatchProcessor([Model()], concurrency=2)


@settings(max_examples=examples(50, long=150))
@given(
    arrivals=st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0, 5.0]), min_size=1, max_size=20),
    speeds=st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=1, max_size=3),
    breaks=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.5, 4.0])), max_size=6),
    batch_size=st.integers(1, 4),
    poison=st.sets(st.integers(0, 19), max_size=3),
)
def test_everybody_is_answered_and_no_replica_computes_two_batches_at_once(
    arrivals: list[float],
    speeds: list[float],
    breaks: list[tuple[int, float]],
    batch_size: int,
    poison: set[int],
) -> None:
    class Single(Fallible):
        busy = False

        async def generate_batch(self, prompts: Any) -> list[Any]:
            assert not self.busy
            self.busy = True
            try:
                return await super().generate_batch(prompts)
            finally:
                self.busy = False

    async def main(clock: ManualClock) -> None:
        models = [Single(base=speed) for speed in speeds]

        async def toggle(number: int) -> None:
            models[number % len(models)].broken ^= True

        async with ParallelBatchProcessor(models, batch_size, clock=clock) as processor:
            prompts = ["bad" if number in poison else f"p{number}" for number in range(len(arrivals))]
            calls = [at(moment, processor.batcher.add_request(p)) for moment, p in zip(arrivals, prompts, strict=True)]
            responses, _ = await asyncio.gather(
                asyncio.gather(*calls), asyncio.gather(*(at(moment, toggle(n)) for n, moment in breaks))
            )
        for prompt, response in zip(prompts, responses, strict=True):
            assert response.error is not None or response.output == prompt.upper()
            assert prompt != "bad" or response.error is not None
            assert breaks or prompt == "bad" or response.error is None
        assert not any(replica.busy for replica in processor.replicas)

    play(main)


def test_what_a_replica_does_to_its_lists_before_it_fails_reaches_no_other() -> None:
    class Spoils:
        async def generate_batch(self, prompts: list[str], requests: list[Any]) -> list[str]:
            prompts.sort()
            requests.pop()
            raise ConnectionError("no")

    class Upper:
        async def generate_batch(self, prompts: list[str], requests: list[Any]) -> list[str]:
            assert [request.prompt for request in requests] == prompts
            return [prompt.upper() for prompt in prompts]

    async def main(clock: ManualClock) -> None:
        async with ParallelBatchProcessor([Spoils(), Upper()], clock=clock) as processor:
            responses = await asyncio.gather(*(processor.submit(word) for word in "cba"))
        assert [response.output for response in responses] == ["C", "B", "A"]

    play(main)


@pytest.mark.parametrize(
    "answer", [lambda prompts: [], lambda prompts: [RuntimeError("CUDA error")] * len(prompts)], ids=["few", "errors"]
)
def test_a_replica_that_answers_with_nothing_of_use_is_taken_out(answer: Callable[[list[str]], list[Any]]) -> None:
    class Broken(Model):
        async def generate_batch(self, prompts: Any) -> list[Any]:
            await super().generate_batch(prompts)
            return answer(prompts)

    async def main(clock: ManualClock) -> None:
        broken = Broken(base=0.001)
        async with ParallelBatchProcessor([Model(base=0.01), broken, Model(base=0.01)], clock=clock) as processor:
            responses = [await processor.submit("x") for _ in range(50)]
            assert [response.output for response in responses] == ["X"] * 50
            assert [replica.failures for replica in processor.replicas] == [0, 1, 0]
        assert len(broken.batches) == 1

    play(main)


def test_what_is_late_is_not_computed_once_more_elsewhere() -> None:
    class Late:
        def __init__(self) -> None:
            self.batches: list[list[str]] = []

        async def generate_batch(self, prompts: list[str]) -> list[Any]:
            self.batches.append(list(prompts))
            return [DeadlineExceeded("late") if prompt == "late" else prompt for prompt in prompts]

    async def main(clock: ManualClock) -> None:
        models = [Late(), Late()]
        async with ParallelBatchProcessor(models, clock=clock) as processor:
            calls = [processor.submit(word) for word in ("late", "a", "b")]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [DeadlineExceeded, InferenceResponse, InferenceResponse]
            assert [batch for model in models for batch in model.batches] == [["late", "a", "b"]]
            assert isinstance((await processor.batcher.add_request("late")).error, DeadlineExceeded)
            assert [replica.failures for replica in processor.replicas] == [0, 0]
            assert processor.batcher._runner.slots == 2
        assert sum(batch == ["late"] for model in models for batch in model.batches) == 1

    play(main)


def test_where_all_answer_with_nothing_of_use_the_batch_is_to_blame() -> None:
    async def few(prompts: list[str]) -> list[str]:
        return []

    async def main(clock: ManualClock) -> None:
        async with ParallelBatchProcessor([few, few], clock=clock) as processor:
            assert "0 outputs" in str((await processor.batcher.add_request("x")).error)
            assert processor.batcher._runner.slots == 2
            assert [replica.failures for replica in processor.replicas] == [0, 0]

    play(main)


def test_one_that_computes_nothing_is_not_always_the_first() -> None:
    async def main(clock: ManualClock) -> None:
        models = [Fallible(base=0.125) for _ in range(3)]
        models[0].broken = True
        runner = Replicas(models, clock)
        for _ in range(4):
            runner.replicas[0].returns = 0.0
            assert await runner.run(["x"], [None]) == ["X"]
        assert [len(model.batches) for model in models] == [2, 2, 2]

    play(main)


@pytest.mark.parametrize(("why", "out"), [(DEADLINES_PASSED, True), (None, False)])
@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_one_in_which_a_batch_hung_until_its_deadlines_is_taken_out(why: str | None, out: bool, seconds: float) -> None:
    async def main(clock: ManualClock) -> None:
        runner = Replicas([Model(base=1.0), Model(base=1e6)], clock)
        await runner.run(["x"], [None])
        task = asyncio.create_task(runner.run(["x"], [None]))
        await asyncio.sleep(seconds)
        task.cancel(why)
        await asyncio.wait([task])
        out_now = out and seconds == 3.0
        assert (runner.slots, runner.replicas[1].failures) == ((1, 1) if out_now else (2, 0))

    play(main)


def test_models_that_are_no_list_are_refused() -> None:
    with pytest.raises(TypeError, match="list of models"):
        ParallelBatchProcessor(Model())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="policy"):
        ParallelBatchProcessor([Model()], policy="auto")


class BlackHole:
    """Answers at once, with an exception for all but the first item of a batch."""

    def __init__(self) -> None:
        self.items = 0

    async def generate_batch(self, prompts: list[str]) -> list[Any]:
        self.items += len(prompts)
        await asyncio.sleep(0.001)
        return [prompts[0].upper(), *(ConnectionError("no") for _ in prompts[1:])]


def test_a_replica_that_fails_most_items_quickly_does_not_draw_the_traffic() -> None:
    async def main(clock: ManualClock) -> None:
        hole = BlackHole()
        models: list[Any] = [Model(base=0.02), hole, Model(base=0.02)]
        async with ParallelBatchProcessor(models, batch_size=16, clock=clock) as processor:
            responses = await asyncio.gather(*(processor.submit("x") for _ in range(480)))
        assert [response.output for response in responses] == ["X"] * 480
        assert hole.items < 48
        assert [replica.failures for replica in processor.replicas] == [0, 1, 0]

    play(main)


def test_an_item_that_fails_in_every_replica_takes_none_out() -> None:
    class Picky(Model):
        def answer(self, prompt: str) -> Any:
            return ValueError(prompt) if prompt == "bad" else super().answer(prompt)

    async def main(clock: ManualClock) -> None:
        models = [Picky(base=0.01) for _ in range(3)]
        async with ParallelBatchProcessor(models, batch_size=4, clock=clock) as processor:
            prompts = ["bad" if number % 3 == 0 else "good" for number in range(300)]
            responses = await asyncio.gather(*(processor.batcher.add_request(prompt) for prompt in prompts))
            for prompt, response in zip(prompts, responses, strict=True):
                assert (response.error is not None) == (prompt == "bad")
            assert [replica.failures for replica in processor.replicas] == [0, 0, 0]
            assert processor.batcher._runner.slots == 3
        computed = sum(batch.count("bad") for model in models for batch in model.batches)
        assert computed <= 2 * 100

    play(main)


def test_items_are_not_tried_elsewhere_where_there_is_nowhere_else() -> None:
    async def main(clock: ManualClock) -> None:
        hole = BlackHole()
        async with ParallelBatchProcessor([hole], batch_size=4, clock=clock) as processor:
            responses = await asyncio.gather(*(processor.batcher.add_request("x") for _ in range(4)))
        assert [response.error is None for response in responses] == [True, False, False, False]
        assert hole.items == 4

    play(main)
