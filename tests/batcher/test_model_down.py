"""A model that fails whatever it is given: it is not searched for a culprit, and is found to be back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from batchwright import InferenceRequest
from batchwright.batcher import Batcher, MemoryEfficientBatcher, SimpleBatcher
from batchwright.clock import ManualClock
from batchwright.errors import GenerationError, InvalidRequest, Overloaded
from batchwright.policies.breaker import Breaker

from .virtual import at, play


class Unsteady:
    """Takes a second a batch. Raises from `down` until `back`, and for a batch that holds a bad prompt."""

    def __init__(self, down: float = 0.0, back: float = float("inf"), seconds: float = 1.0) -> None:
        self.down = down
        self.back = back
        self.seconds = seconds
        self.batches: list[list[str]] = []

    async def generate_batch(self, prompts: Sequence[str]) -> list[Any]:
        self.batches.append(list(prompts))
        await asyncio.sleep(self.seconds)
        if self.down <= asyncio.get_running_loop().time() < self.back:
            raise ConnectionError("connection refused")
        if any(prompt.startswith("bad") for prompt in prompts):
            raise ValueError("bad prompt")
        return [prompt.upper() for prompt in prompts]


async def _ended(batcher: Batcher, prompts: Sequence[str], **options: Any) -> list[Any]:
    return await asyncio.gather(*(batcher.compute(each, **options) for each in prompts), return_exceptions=True)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
@pytest.mark.parametrize(("size", "concurrency"), [(64, 1), (64, 4), (8, 1), (100, 1)])
def test_a_model_that_is_down_is_called_little_more_than_once_a_batch(
    size: int, concurrency: int, seconds: float
) -> None:
    model = Unsteady(seconds=seconds)
    prompts = [f"prompt {number}" for number in range(1000)]

    async def main(clock: ManualClock) -> list[Any]:
        batcher = SimpleBatcher(model, size, concurrency=concurrency, clock=clock)
        return await _ended(batcher, prompts)

    ended = play(main)
    assert all(isinstance(error, (ConnectionError, Overloaded)) for error in ended)
    assert len(model.batches) <= 1.2 * -(-1000 // size) + concurrency - 1
    refused = [error for error in ended if isinstance(error, Overloaded)]
    assert refused
    assert all(error.retry_after is not None and 1.0 <= error.retry_after <= 60.0 for error in refused)
    assert "the model is down: it fails every request, the last with ConnectionError; try again in" in str(refused[0])


def test_a_single_batch_is_not_bisected_to_the_end_either() -> None:
    model = Unsteady()

    async def main(clock: ManualClock) -> list[Any]:
        return await _ended(Batcher(model, clock=clock), ["x"] * 64)

    assert all(isinstance(error, ConnectionError) for error in play(main))
    assert len(model.batches) <= 13


@pytest.mark.parametrize("kind", ["batcher", "continuous arrivals"])
def test_it_is_found_to_be_back_and_loses_nobody_who_comes_then(kind: str) -> None:
    model = Unsteady(back=100.5)

    async def main(clock: ManualClock) -> tuple[list[Any], bool, bool]:
        batcher = SimpleBatcher(model, 8, 100, clock=clock)
        first = await _ended(batcher, [f"early {number}" for number in range(400)])
        was_down = batcher.stats().is_model_down
        late = [at(110.0, batcher.compute(f"late {number}")) for number in range(20)]
        return [first, await asyncio.gather(*late)], was_down, batcher.stats().is_model_down

    (first, late), was_down, is_down = play(main)
    assert any(isinstance(error, Exception) for error in first)
    assert late == [f"LATE {number}" for number in range(20)]
    assert (was_down, is_down) == (True, False)


def test_only_one_request_at_a_time_tries_a_model_that_is_down() -> None:
    model = Unsteady()
    at_once = most = 0
    compute = model.generate_batch

    async def counted(prompts: Sequence[str]) -> list[Any]:
        nonlocal at_once, most
        at_once += 1
        if asyncio.get_running_loop().time() > 50.0:
            most = max(most, at_once)
            assert len(prompts) == 1
        try:
            return await compute(prompts)
        finally:
            at_once -= 1

    async def main(clock: ManualClock) -> None:
        batcher = Batcher(counted, concurrency=4, clock=clock)
        for _ in range(60):
            await asyncio.gather(_ended(batcher, ["x"] * 200), asyncio.sleep(2.0))

    play(main)
    assert most == 1


def _poisoned(share: float, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [("bad" if rng.random() < share else "good") + f" {number}" for number in range(count)]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_bad_requests_however_many_take_no_good_one_with_them(seed: int, share: float) -> None:
    model = Unsteady(down=1e9)
    prompts = _poisoned(share, 2000, seed)

    async def main(clock: ManualClock) -> list[Any]:
        return await _ended(Batcher(model, clock=clock), prompts)

    for prompt, ended in zip(prompts, play(main), strict=True):
        assert isinstance(ended, ValueError) if prompt.startswith("bad") else ended == prompt.upper()


def test_one_bad_request_in_a_hundred_costs_no_more_calls_than_before() -> None:
    """What the search takes by itself, measured without a breaker: 4.41 calls a batch on average."""
    calls = []
    for seed in range(20):
        model = Unsteady(down=1e9)
        prompts = _poisoned(0.01, 2000, seed)

        async def main(clock: ManualClock, model: Unsteady = model, prompts: list[str] = prompts) -> list[Any]:
            return await _ended(Batcher(model, length=len, clock=clock), prompts)

        play(main)
        calls.append(len(model.batches))
    assert sum(calls) / 20 / 32 <= 1.02 * 4.41, sum(calls) / 20 / 32


def test_a_request_that_fails_alone_is_tried_again_where_it_was_asked_for() -> None:
    model = Unsteady(back=1.5)

    async def main(clock: ManualClock) -> tuple[list[Any], float]:
        async with Batcher(model, retries=3, clock=clock) as batcher:
            ended = await _ended(batcher, ["hello"])
            return ended, clock.now()

    ended, now = play(main)
    assert ended == ["HELLO"]
    assert 2.05 <= now <= 2.1  # one second failed, half to all of 100 ms, one second
    assert len(model.batches) == 2


def test_retries_grow_rarer_and_end() -> None:
    model = Unsteady(seconds=0.0)

    async def main(clock: ManualClock) -> tuple[list[Any], float]:
        batcher = Batcher(model, retries=3, clock=clock)
        return await _ended(batcher, ["hello"]), clock.now()

    (ended,), now = play(main)
    assert isinstance(ended, ConnectionError)
    assert len(model.batches) == 4
    assert 0.35 <= now <= 0.7


def test_a_batch_that_is_not_isolated_is_not_tried_again() -> None:
    model = Unsteady(seconds=0.0)

    async def main(clock: ManualClock) -> list[Any]:
        return await _ended(Batcher(model, retries=3, isolate_failures=False, clock=clock), ["a", "b"])

    assert [type(each) for each in play(main)] == [ConnectionError] * 2
    assert len(model.batches) == 1


def test_an_exception_among_the_outputs_is_tried_again_too() -> None:
    calls: list[list[str]] = []

    async def model(prompts: list[str]) -> list[Any]:
        calls.append(prompts)
        return [TimeoutError(prompt) if prompt == "slow" and len(calls) < 3 else prompt for prompt in prompts]

    async def main(clock: ManualClock) -> list[Any]:
        async with Batcher(model, retries=2, clock=clock) as batcher:
            return await _ended(batcher, ["a", "slow", "b"])

    assert play(main) == ["a", "slow", "b"]
    assert calls == [["a", "slow", "b"], ["slow"], ["slow"]]


def test_a_deadline_and_a_caller_that_leaves_end_a_pause() -> None:
    model = Unsteady(seconds=0.0)

    async def main(clock: ManualClock) -> tuple[float, list[Any], int]:
        batcher = Batcher(model, retries=50, clock=clock)
        leaver = asyncio.create_task(batcher.compute("leaves"))
        ended = await _ended(batcher, ["late"], deadline=2.0)
        now = clock.now()
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        await batcher.close()
        return now, ended, batcher.stats().running

    now, (late,), running = play(main)
    assert now == pytest.approx(2.0)
    assert isinstance(late, TimeoutError)
    assert running == 0


def test_closing_does_not_wait_for_a_pause() -> None:
    model = Unsteady(seconds=0.0)

    async def main(clock: ManualClock) -> tuple[float, Any]:
        batcher = Batcher(model, retries=5, clock=clock)
        caller = asyncio.create_task(batcher.add_request(InferenceRequest("hello")))
        await asyncio.sleep(0.01)
        await batcher.close()
        return clock.now(), await caller

    now, response = play(main)
    assert now == pytest.approx(0.01)
    assert isinstance(response.error, GenerationError)


def test_the_more_were_to_blame_the_more_single_requests_are_tried() -> None:
    def singles(settled: int, bad: int) -> int:
        breaker = Breaker()
        for _ in range(bad):
            breaker.failed(1, ValueError(), 0.0, was_suspected=False)
        breaker.succeeded(settled)
        for _ in range(3):
            breaker.failed(64, ConnectionError(), 0.0, was_suspected=False)
        tried = 0
        while not breaker.is_open:
            assert breaker.is_doubtful
            breaker.failed(1, ConnectionError(), 0.0, was_suspected=False)
            tried += 1
        return tried

    assert [singles(1000, 0), singles(1000, 10), singles(1000, 200), singles(1000, 900)] == [8, 8, 8, 18]


def test_failures_of_different_kinds_are_not_one_outage() -> None:
    breaker = Breaker()
    for number in range(100):
        breaker.failed(64, ValueError() if number % 2 else TypeError(), 0.0, was_suspected=False)
        assert not breaker.is_doubtful


def test_halves_of_a_batch_that_failed_raise_no_doubt() -> None:
    breaker = Breaker()
    for size in (64, 32, 16, 8, 4, 2):
        breaker.failed(size, ValueError(), 0.0, was_suspected=size < 64)
    assert not breaker.is_doubtful


def test_an_outage_is_expected_to_last_as_long_again() -> None:
    breaker = Breaker()
    breaker.failed(64, ConnectionError(), 100.0, was_suspected=False)
    assert [breaker.retry_after(now) for now in (100.0, 107.0, 1000.0)] == [1.0, 7.0, 60.0]


def test_what_the_request_is_to_blame_for_is_not_tried_again() -> None:
    calls = 0

    async def model(prompts: list[str]) -> list[Any]:
        nonlocal calls
        calls += 1
        return [InvalidRequest("the prompt is too long") for _ in prompts]

    async def main(clock: ManualClock) -> None:
        async with Batcher(model, retries=3, clock=clock) as batcher:
            assert isinstance((await batcher.add_request("x")).error, InvalidRequest)

    play(main)
    assert calls == 1


def test_bare_sequences_are_not_asked_for_again_while_the_model_is_down() -> None:
    def calls(sequences: list[Any]) -> int:
        model = Unsteady(seconds=0.01)

        async def main(clock: ManualClock) -> None:
            async with MemoryEfficientBatcher(model, 0.02, 1000, clock=clock) as batcher:
                await asyncio.gather(batcher.process_with_memory_limit(sequences), return_exceptions=True)

        play(main)
        return len(model.batches)

    texts = ["a text"] * 300
    assert calls(texts) <= calls([InferenceRequest(text, max_tokens=1) for text in texts])
