"""One batcher, one event loop, virtual time: who is answered what, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batchwright import InferenceRequest, InferenceResponse, InvalidRequest, Usage
from batchwright.batcher import (
    AdaptiveBatcher,
    Batcher,
    LengthAwareBatcher,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.clock import ManualClock
from batchwright.errors import BatcherClosed, Cancelled, DeadlineExceeded, Overloaded
from batchwright.policies import BySize, FairShare, Policy, Urgency, auto
from batchwright.request import MAX_DEADLINE

from .virtual import Model, at, outcome, play


def test_each_caller_gets_its_own_answer_with_measured_times() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1.0)
        async with Batcher(model, clock=clock) as batcher:
            first, second, third = await asyncio.gather(
                batcher.add_request("a"), at(0.25, batcher.add_request("b")), at(0.5, batcher.add_request("c"))
            )
        assert [response.output for response in (first, second, third)] == ["A", "B", "C"]
        assert model.batches == [["a"], ["b", "c"]]
        assert [first.queue_ms, second.queue_ms, third.queue_ms] == [0.0, 750.0, 500.0]
        assert [first.latency_ms, second.latency_ms, third.latency_ms] == [1000.0, 1750.0, 1500.0]
        assert first.finish_reason == "stop"
        stats = batcher.stats()
        assert (stats.requests, stats.succeeded, stats.batches, stats.occupancy) == (3, 3, 2, 1.5)
        assert stats.reasons == {"idle": 2}

    play(main)


def test_requests_of_one_turn_go_together_though_the_model_is_free() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with Batcher(model, clock=clock) as batcher:
            await asyncio.gather(*(batcher.add_request(str(i)) for i in range(5)))
        assert model.batches == [["0", "1", "2", "3", "4"]]

    play(main)


def test_the_most_urgent_go_first() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with PriorityBatcher(model, 1, 0, clock=clock) as batcher:
            await asyncio.gather(
                batcher.add_request("now"),
                at(0.1, batcher.add_request("usual")),
                at(0.2, batcher.add_request(InferenceRequest("own", priority=3))),
                at(0.3, batcher.add_request("urgent", priority=1)),
                at(0.4, batcher.add_request(InferenceRequest("given", priority=9), 2)),
            )
        assert model.batches == [["now"], ["urgent"], ["given"], ["own"], ["usual"]]

    play(main)


@pytest.mark.parametrize("priority", [float("nan"), 2.5, "high", 10**400], ids=["nan", "real", "word", "huge"])
def test_what_is_no_priority_is_refused(priority: Any) -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            with pytest.raises(InvalidRequest, match="priority"):
                await batcher.add_request("x", priority=priority)
            with pytest.raises(InvalidRequest, match="priority"):
                await batcher.compute("x", priority=priority)
            assert await batcher.compute("x", priority=-3) == "X"

    play(main)


def test_tenants_share() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with Batcher(model, Policy(BySize(1), order=FairShare()), clock=clock) as batcher:
            flood = [batcher.add_request(f"a{i}", tenant="a") for i in range(4)]
            await asyncio.gather(*flood, batcher.add_request("b", tenant="b"))
        assert [batch[0] for batch in model.batches].index("b") == 1

    play(main)


def test_two_batches_at_once() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1.0)
        async with Batcher(model, Policy(BySize(2)), concurrency=2, clock=clock) as batcher:
            await asyncio.gather(*(batcher.add_request("x") for _ in range(6)))
        assert model.starts == [0.0, 0.0, 1.0]

    play(main)


def test_a_cancelled_request_leaves_the_queue_and_is_not_computed() -> None:
    async def main(clock: ManualClock) -> None:
        model, told = Model(), list[InferenceResponse]()
        async with Batcher(model, clock=clock) as batcher:
            first = asyncio.create_task(batcher.add_request("first"))
            await asyncio.sleep(0.1)
            gone = asyncio.create_task(batcher.add_request(InferenceRequest("gone", callback=told.append)))
            stays = asyncio.create_task(batcher.add_request("stays"))
            await asyncio.sleep(0.1)
            gone.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert batcher.stats().waiting == 1
            assert (await first, await stays) is not None
            assert gone.cancelled()
        assert model.batches == [["first"], ["stays"]]
        assert batcher.stats().cancelled == 1
        assert isinstance(told[0].error, Cancelled)
        assert told[0].finish_reason == "cancelled"

    play(main)


def test_a_request_cancelled_in_the_turn_of_its_dispatch_is_not_computed() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with Batcher(model, clock=clock) as batcher:
            gone = asyncio.create_task(batcher.add_request("gone"))
            stays = asyncio.create_task(batcher.add_request("stays"))
            await asyncio.sleep(0)
            gone.cancel()
            await stays
        assert model.batches == [["stays"]]

    play(main)


def test_a_batch_whose_callers_have_all_gone_frees_the_model() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=1000.0)
        async with Batcher(model, clock=clock) as batcher:
            gone = [asyncio.create_task(batcher.add_request("gone")) for _ in range(2)]
            await asyncio.sleep(1)
            for task in gone:
                task.cancel()
            model.base = 1.0
            response = await batcher.add_request("next")
            assert response.latency_ms == 1000.0

    play(main)


def test_a_deadline_that_passes_in_the_queue_is_answered_then_and_there() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=10.0)
        async with Batcher(model, clock=clock) as batcher:
            first = asyncio.create_task(batcher.add_request("first"))
            await asyncio.sleep(1)
            late = await batcher.add_request(InferenceRequest("late", deadline=2.0))
            assert clock.now() == 3.0
            assert isinstance(late.error, DeadlineExceeded)
            assert "in the queue" in str(late.error)
            assert (late.latency_ms, late.queue_ms) == (2000.0, 2000.0)
            await first
        assert model.batches == [["first"]]
        assert batcher.stats().expired == 1

    play(main)


def test_certain_lateness_is_refused_at_once_with_the_prediction() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(base=0.0, each=1.0), Policy(BySize(1)), clock=clock) as batcher:
            for _ in range(3):
                await batcher.add_request("x")
            queued = [asyncio.create_task(batcher.add_request("x")) for _ in range(5)]
            await asyncio.sleep(0.5)
            before = clock.now()
            with pytest.raises(DeadlineExceeded, match="deadline is in 4000 ms") as refusal:
                await batcher.add_request("x", deadline=4.0)
            assert clock.now() == before
            assert refusal.value.predicted_ms == pytest.approx(5500.0)
            assert (await batcher.add_request("x", deadline=6.0)).error is None
            await asyncio.gather(*queued)
        assert batcher.stats().refused == 1

    play(main)


def test_nobody_is_refused_for_those_who_come_after_it() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(0.0, 0.05), Policy(BySize(2), order=Urgency()), clock=clock) as batcher:
            for length in (1, 5, 10, 20):
                await batcher.compute("x" * length)
            calls = [asyncio.create_task(batcher.compute("x"))]
            await asyncio.sleep(0.001)
            calls += [asyncio.create_task(batcher.compute("x" * 1000, priority=9)) for _ in range(4)]
            calls.append(asyncio.create_task(batcher.compute("x", priority=0)))
            await asyncio.sleep(0)
            assert await batcher.compute("y", priority=0, deadline=15.0) == "Y"
            await asyncio.gather(*calls)

    play(main)


def test_a_free_model_is_asked_although_it_was_too_slow_before() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=10.0)
        async with Batcher(model, clock=clock) as batcher:
            for _ in range(5):
                await batcher.add_request("x")
            model.base = 0.5
            assert await outcome(batcher, "x", deadline=1.0) == "X"

    play(main)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(base=2.0), Policy(BySize(2)), max_waiting=4, clock=clock) as batcher:
            running = [asyncio.create_task(batcher.add_request("x")) for _ in range(2)]
            await asyncio.sleep(0.5)
            waiting = [asyncio.create_task(batcher.add_request("x")) for _ in range(4)]
            await asyncio.sleep(0.5)
            with pytest.raises(Overloaded, match="4 requests wait, the limit is 4") as unknown:
                await batcher.add_request("x")
            assert unknown.value.retry_after is None
            await asyncio.gather(*running)
            refilled = [asyncio.create_task(batcher.add_request("x")) for _ in range(2)]
            await asyncio.sleep(0.5)
            with pytest.raises(Overloaded, match="try again in") as known:
                await batcher.add_request("x")
            # What runs takes 1.5 s more, and the four that wait two batches of 2 s.
            assert known.value.retry_after == pytest.approx(5.5)
            await asyncio.gather(*waiting, *refilled)
        assert batcher.stats().overloaded == 2

    play(main)


def test_the_queue_is_bounded_by_tokens_too_and_a_single_giant_is_taken() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), max_waiting_tokens=10, length=len, clock=clock) as batcher:
            tasks = [asyncio.create_task(outcome(batcher, "x"))]
            await asyncio.sleep(0.1)
            tasks += [asyncio.create_task(outcome(batcher, "x" * n)) for n in (6, 5, 4)]
            words = await asyncio.gather(*tasks)
            assert words == ["X", "XXXXXX", "refused: Overloaded", "XXXX"]
            assert await outcome(batcher, "y" * 50) == "Y" * 50

    play(main)


def test_closing_computes_what_waits_even_where_the_policy_would_hold_it() -> None:
    async def main(clock: ManualClock) -> None:
        batcher = SimpleBatcher(Model(base=1.0), 100, 1e9, clock=clock)
        tasks = [asyncio.create_task(outcome(batcher, "x")) for _ in range(3)]
        await asyncio.sleep(0.5)
        await batcher.close()
        assert clock.now() == 1.5
        assert [task.result() for task in tasks] == ["X"] * 3
        assert batcher.stats().reasons == {"drain": 1}
        with pytest.raises(BatcherClosed):
            await batcher.add_request("x")
        await batcher.close()

    play(main)


def test_closing_without_draining_answers_all_at_once() -> None:
    async def main(clock: ManualClock) -> None:
        batcher = Batcher(Model(base=1000.0), Policy(BySize(1)), clock=clock)
        tasks = [asyncio.create_task(outcome(batcher, "x")) for _ in range(3)]
        await asyncio.sleep(0.5)
        await batcher.close(drain=False)
        assert clock.now() == 0.5
        assert await asyncio.gather(*tasks) == ["BatcherClosed"] * 3

    play(main)


def test_a_closed_batcher_that_was_never_used_refuses() -> None:
    async def main(clock: ManualClock) -> None:
        batcher = Batcher(Model(), clock=clock)
        await batcher.close()
        assert await outcome(batcher, "x") == "refused: BatcherClosed"

    play(main)


class _Letters:
    """A tokenizer: one token for each letter, and one more for the beginning of a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


def test_tokens_are_counted_by_the_tokenizer_of_the_model() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        model.tokenizer = _Letters()  # type: ignore[attr-defined]
        async with Batcher(model, clock=clock) as batcher:
            response = await batcher.add_request("two words")
        assert (response.tokens_generated, response.usage) == (9, Usage(10, 9))
        assert batcher.stats().tokens == 10
        assert batcher.stats().tokens_per_second == 19.0

    play(main)


def test_without_a_tokenizer_tokens_are_estimated_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main(clock: ManualClock) -> None:
        caplog.set_level("INFO", "batchwright.batcher")
        async with Batcher(Model(), clock=clock) as batcher:
            responses = [await batcher.add_request("two words") for _ in range(3)]
            stats = batcher.stats()
        usage = Usage(3, 3, is_estimate=True)
        assert [(each.tokens_generated, each.usage) for each in responses] == [(3, usage)] * 3
        assert (stats.tokens, stats.generated_tokens) == (9, 9)

        async def first(prompts: list[Any]) -> list[Any]:
            return [prompt[0] for prompt in prompts]

        async with Batcher(first, clock=clock) as batcher:
            assert (await batcher.add_request([1, 2, 3, 4, 5])).usage == Usage(5, 0)

    play(main)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the model has no tokenizer"]


def test_a_model_may_take_the_requests_and_answer_with_responses() -> None:
    class Full:
        async def generate_batch(self, prompts: list[Any], requests: list[InferenceRequest]) -> list[Any]:
            await asyncio.sleep(1.0)
            return [
                InferenceResponse("other", f"{r.prompt}{r.max_tokens}", 7, 0.0, 0.0, "length", Usage(3, 7))
                for r in requests
            ]

    async def main(clock: ManualClock) -> None:
        async with Batcher(Full(), clock=clock) as batcher:
            request = InferenceRequest("p", request_id="mine", max_tokens=7, metadata={"k": 1})
            response = await batcher.add_request(request)
        assert (response.request_id, response.output, response.tokens_generated) == ("mine", "p7", 7)
        assert (response.latency_ms, response.finish_reason, response.metadata) == (1000.0, "length", {"k": 1})
        assert batcher.stats().generated_tokens == 7

    play(main)


def test_a_model_that_takes_the_requests_gets_what_is_left_of_their_deadlines() -> None:
    class Slow:
        def __init__(self) -> None:
            self.deadlines: list[list[float | None]] = []

        async def generate_batch(self, prompts: list[Any], requests: list[InferenceRequest]) -> list[Any]:
            self.deadlines.append([request.deadline for request in requests])
            await asyncio.sleep(1.0)
            return prompts

    async def main(clock: ManualClock) -> None:
        model = Slow()
        async with Batcher(model, clock=clock) as batcher:
            first = asyncio.create_task(batcher.add_request("a"))
            await asyncio.sleep(0.25)
            later = [
                batcher.add_request(InferenceRequest("b", deadline=8.0)),
                batcher.add_request(InferenceRequest("c", deadline=8.0), deadline=4.0),
                batcher.add_request("d", deadline=1e12),
                batcher.add_request("e"),
            ]
            responses = await asyncio.gather(first, *later)
        assert [response.output for response in responses] == ["a", "b", "c", "d", "e"]
        assert model.deadlines[0] == [None]
        assert model.deadlines[1:] == [[3.25, 7.25, MAX_DEADLINE, None]]

    play(main)


def test_bare_items_may_be_anything() -> None:
    async def double(items: list[Any]) -> list[Any]:
        return [item * 2 for item in items]

    async def main(clock: ManualClock) -> None:
        async with Batcher(double, clock=clock) as batcher:
            assert await asyncio.gather(*map(batcher.compute, (4, (1,), 0.5))) == [8, (1, 1), 1.0]

    play(main)


def test_like_lengths_are_batched_and_padding_is_counted() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=0.001, each=0.01)
        async with LengthAwareBatcher(model, 4096, 4, clock=clock) as batcher:
            for size in (1, 2, 3):
                await asyncio.gather(*(batcher.compute("x" * (5 * size)) for _ in range(size)))
            await asyncio.gather(*(batcher.compute("x" * n) for n in (100, 2, 100, 2, 2, 100, 2, 100)))
        assert [sorted(map(len, batch)) for batch in model.batches[3:]] == [[100] * 4, [2] * 4]
        assert batcher.stats().padding_efficiency == 1.0

    play(main)


def test_adaptive_starts_small_and_grows() -> None:
    async def main(clock: ManualClock) -> None:
        model = Model(base=0.001)
        async with AdaptiveBatcher(model, target_latency_ms=1000, clock=clock) as batcher:
            await asyncio.gather(*(batcher.compute("x") for _ in range(63)))
        assert [len(batch) for batch in model.batches] == [1, 2, 4, 8, 16, 32]

    play(main)


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="model of type int"):
        Batcher(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="policy='fastest'"):
        Batcher(Model(), "fastest")
    with pytest.raises(ValueError, match="concurrency=0"):
        Batcher(Model(), concurrency=0)
    with pytest.raises(ValueError, match="max_waiting=-1"):
        Batcher(Model(), max_waiting=-1)
    with pytest.raises(ValueError, match="max_waiting_tokens=0"):
        Batcher(Model(), max_waiting_tokens=0)
    with pytest.raises(TypeError, match="policy of type function"):
        Batcher(Model(), auto)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size=0"):
        SimpleBatcher(Model(), 0)
    with pytest.raises(ValueError, match="max_wait_ms=-1"):
        PriorityBatcher(Model(), max_wait_ms=-1)
    with pytest.raises(ValueError, match="window_ms=nan"):
        TimeBasedBatcher(Model(), float("nan"))

    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            with pytest.raises(InvalidRequest, match="prompt"):
                await batcher.add_request([])
            with pytest.raises(ValueError, match="deadline=0"):
                await batcher.add_request("x", deadline=0)

    play(main)


def test_answered_deadlines_and_cancelled_requests_are_not_kept() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            for _ in range(40):
                await asyncio.gather(*(batcher.compute("x", deadline=1e6) for _ in range(10)))
            core = batcher._core
            assert core is not None
            assert len(core._deadlines) < 100
            assert core._waiting_tokens == 0

    play(main)


def test_a_function_may_call_its_prompts_requests() -> None:
    async def model(requests: list[str]) -> list[str]:
        return [text.upper() for text in requests]

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, clock=clock) as batcher:
            assert await batcher.compute("a") == "A"

    play(main)


def test_what_is_no_model_length_or_clock_is_refused_where_it_stands() -> None:
    with pytest.raises(TypeError, match=r"give an instance of it, such as Model\(\)"):
        Batcher(Model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="length=5"):
        Batcher(Model(), length=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="clock=5"):
        Batcher(Model(), clock=5)  # type: ignore[arg-type]


def test_an_item_needs_no_priority() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            assert await batcher.compute("x", priority=None) == "X"

    play(main)


def test_an_error_that_cannot_be_told_fails_its_request_all_the_same() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async def model(items: list[str]) -> list[str]:
        raise Silent

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, clock=clock) as batcher:
            error = (await batcher.add_request("x")).error
        assert error is not None
        assert isinstance(error.__cause__, Silent)

    play(main)
