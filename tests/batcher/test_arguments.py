"""Arguments of the named batchers that make no sense are refused under the names that the caller knows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from batchwright import InferenceRequest
from batchwright.batcher import AdaptiveBatcher, Batcher, MemoryEfficientBatcher
from batchwright.clock import ManualClock
from batchwright.policies import BySize, FairShare, Policy

from .virtual import Model, play


@pytest.mark.parametrize("target", [0, -1, float("nan"), float("inf"), "8", None, True])
def test_a_target_is_named_with_its_unit(target: Any) -> None:
    with pytest.raises(ValueError, match=r"^target_latency_ms=.*must be"):
        AdaptiveBatcher(Model(), target_latency_ms=target)


@pytest.mark.parametrize("requests", ["abc", b"abc", InferenceRequest("abc"), 3, None])
def test_a_single_prompt_is_no_list_of_them(requests: Any) -> None:
    async def main(clock: ManualClock) -> None:
        model = Model()
        async with MemoryEfficientBatcher(model, clock=clock) as batcher:
            with pytest.raises(TypeError, match=r"sequences of type .*: must be a list|sequence_length: give it"):
                await batcher.process_with_memory_limit(requests)
            for function in (batcher.estimate_memory, batcher.find_optimal_batch_size):
                with pytest.raises(TypeError, match=r"sequences of type .*: must be a list|sequence_length: give it"):
                    function(requests)
        assert model.batches == []

    play(main)


def test_a_tenant_that_cannot_be_a_key_is_refused_and_the_next_is_served() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), Policy(BySize(2), order=FairShare()), clock=clock) as batcher:
            wrong: Any = [1]
            with pytest.raises(TypeError, match=r"tenant=\[1\]: must be hashable"):
                await batcher.add_request("a", tenant=wrong)
            answers = await asyncio.gather(*(batcher.add_request("b", tenant="t") for _ in range(3)))
            assert [answer.output for answer in answers] == ["B"] * 3
            assert (batcher.stats().requests, batcher.stats().too_large) == (3, 0)

    play(main)
