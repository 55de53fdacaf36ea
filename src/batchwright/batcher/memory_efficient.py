"""`MemoryEfficientBatcher`: the largest batches that fit in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from batchwright.batcher.batcher import Batcher
from batchwright.batcher.entry import failed_response
from batchwright.batcher.model import Model
from batchwright.errors import BatchwrightError, Overloaded
from batchwright.policies import Item, Memory, Policy, Urgency, WithinMemory
from batchwright.request import InferenceRequest, InferenceResponse, Prompt

_PAUSE = 0.1
"""Seconds until a full queue is tried again when it is not known when it will have room."""


class MemoryEfficientBatcher(Batcher):
    """Batcher of as many requests as fit in memory, which makes smaller batches when memory runs out all the same.

    Use it when batches fail for lack of memory, or are kept small for fear of it. The memory of a batch is estimated as

        MB = (longest prompt + most max_tokens) · requests / tokens_per_mb

    and kept within `max_memory_mb`. Lengths are tokens where the model has a `tokenizer` or prompts are token ids;
    otherwise say with `length=` how to measure, or choose `tokens_per_mb` in characters. Bare items (`compute`)
    generate nothing. Whenever the model is free, the most urgent request goes with those that suit it. With
    `concurrency=n`, each of n batches may take `max_memory_mb`.

    A request that exceeds the limit alone is refused with `ContextLengthExceeded`. A batch that runs out of memory
    (`MemoryError`, torch's `OutOfMemoryError`, `OutOfMemory`, or a RuntimeError that says so) is halved and tried
    again, whatever `isolate_failures` says; later batches are smaller, and grow again slowly. A request for which
    memory runs out although it is computed alone is answered with `OutOfMemory`. `stats()` counts `out_of_memory` and
    says which `memory_limit_mb` is in use.

    To fit other policies into memory, give `Batcher` the policy `within_memory(inner=...)`.
    """

    def __init__(self, model: Model, max_memory_mb: float = 8000, tokens_per_mb: float = 1000, **options: Any) -> None:
        self._memory = Memory(max_memory_mb, tokens_per_mb)
        super().__init__(model, Policy(WithinMemory(self._memory), order=Urgency()), **options)

    def estimate_memory(self, requests: Sequence[InferenceRequest | Prompt]) -> float:
        """Return the MB that these need by the formula; 0 for none. A bare prompt has `max_tokens` of 256."""
        return self._memory.estimate(self._items(requests))

    def find_optimal_batch_size(self, requests: Sequence[InferenceRequest | Prompt]) -> int:
        """Return how many of the first of `requests` fit into memory together, by the limit now in use.

        0 when there are none, or the first exceeds `max_memory_mb` alone. To put as many together as possible, sort
        them by length.
        """
        items = self._items(requests)
        return self._memory.leading(items) if items and self._memory.admits(items[0]) else 0

    async def process_with_memory_limit(self, requests: Sequence[InferenceRequest | Prompt]) -> list[InferenceResponse]:
        """Have all of `requests`, any number of them, computed, and return their answers in order.

        One that is refused or fails has `error` set and concerns no other. At most half of the queue is taken up at a
        time, and where it is full because of others it is waited for. Raises `InvalidRequest`, before anything is
        computed, for what is no prompt, and TypeError for a single prompt or request in place of a list.
        """
        asked = self._requests(requests)
        answers: dict[int, InferenceResponse] = {}
        rest = iter(range(len(asked)))

        async def work() -> None:
            for number in rest:
                answers[number] = await self._process(asked[number])

        workers = min(len(asked), max(1, self._limits.waiting // 2))
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
        return [answers[number] for number in range(len(asked))]

    async def _process(self, request: InferenceRequest) -> InferenceResponse:
        while True:
            try:
                return await self.add_request(request)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after or _PAUSE)
            except BatchwrightError as error:
                return failed_response(request, error)

    def _items(self, requests: Sequence[InferenceRequest | Prompt]) -> list[Item]:
        asked = self._requests(requests)
        return [Item(0.0, self._measure.length(each.prompt), max_tokens=each.max_tokens) for each in asked]

    def _requests(self, requests: Sequence[InferenceRequest | Prompt]) -> list[InferenceRequest]:
        if isinstance(requests, (str, bytes, InferenceRequest)) or not isinstance(requests, Iterable):
            raise TypeError(f"requests of type {type(requests).__name__}: must be a list of requests or prompts")
        return [each if isinstance(each, InferenceRequest) else InferenceRequest(each) for each in requests]
