"""`MemoryEfficientBatcher`: the largest batches that fit in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, cast, overload

from batchwright.batcher.batcher import Batcher
from batchwright.batcher.entry import failed_response
from batchwright.batcher.model import Model
from batchwright.errors import BatchwrightError, Overloaded
from batchwright.policies import Item, Memory, Policy, Urgency, WithinMemory
from batchwright.policies.checks import check_size
from batchwright.request import InferenceRequest

_PAUSE = 0.1
"""Seconds until a full queue is retried, if it is not known when it will have room."""


class MemoryEfficientBatcher(Batcher):
    """Batcher of as many requests as fit in memory, which makes batches smaller if memory runs out nevertheless.

    Use it if batches run out of memory, or are kept small to avoid that. The memory of a batch is estimated as

        MB = (longest prompt + most max_tokens) · requests / tokens_per_mb

    and kept within `max_memory_mb`. Lengths are tokens if the model has a `tokenizer` or prompts are token ids;
    otherwise they are estimated, unless `length=` measures them. Bare items (`compute`) generate nothing. Whenever the
    model is free, the most urgent request is dispatched, with others that suit it. With `concurrency=n`, each of n
    batches may take `max_memory_mb`.

    A request that exceeds the limit by itself is refused with `ContextLengthExceeded`. A batch that runs out of memory
    (`MemoryError`, torch's `OutOfMemoryError`, `OutOfMemory`, or a RuntimeError that says so) is halved and retried,
    whatever `isolate_failures` is; later batches are smaller, and grow again slowly. A request for which memory runs
    out even alone is answered with `OutOfMemory`. `stats()` counts `out_of_memory` and has the current
    `memory_limit_mb`.

    To fit other policies into memory, give `Batcher` the policy `within_memory(inner=...)`.
    """

    def __init__(self, model: Model, max_memory_mb: float = 8000, tokens_per_mb: float = 1000, **options: Any) -> None:
        self._memory = Memory(max_memory_mb, tokens_per_mb)
        super().__init__(model, Policy(WithinMemory(self._memory), order=Urgency()), **options)
        self.max_memory_mb: Final = max_memory_mb
        self.tokens_per_mb: Final = tokens_per_mb

    @overload
    def estimate_memory(self, batch_size: Sequence[Any], /) -> float: ...

    @overload
    def estimate_memory(self, batch_size: int, sequence_length: int) -> float: ...

    def estimate_memory(self, batch_size: int | Sequence[Any], sequence_length: int | None = None) -> float:
        """Return the MB that a batch needs by the formula; 0 for an empty batch.

        A batch is given by its size and the length of its longest sequence, or as the requests and prompts themselves;
        a bare prompt generates nothing.
        """
        if not isinstance(batch_size, Integral):
            return self._memory.estimate(self._items(cast("Sequence[Any]", batch_size)))
        check_size("batch_size", int(batch_size), least=0)
        if sequence_length is None:
            raise TypeError("sequence_length: give it with a batch_size, or the requests themselves")
        check_size("sequence_length", sequence_length, least=0)
        return self._memory.megabytes(sequence_length, 0, int(batch_size))

    def find_optimal_batch_size(self, sequences: Sequence[Any]) -> int:
        """Return how many of the first `sequences` fit into memory together, by the current limit.

        They may be requests, prompts or token ids; only requests generate tokens. 0 if there are none, or the first
        exceeds `max_memory_mb` by itself. To batch as many as possible, sort them by length.
        """
        items = self._items(sequences)
        return self._memory.leading(items) if items and self._memory.admits(items[0]) else 0

    async def process_with_memory_limit(self, sequences: Sequence[Any]) -> list[Any]:
        """Compute all of `sequences`, any number of them, and return their results in order.

        The result of an `InferenceRequest` is its answer, with `error` set if it is refused or fails, which does not
        affect the others. The result of anything else is the model's output; if some of these fail, the first error is
        raised once all have been computed. At most half of the queue is used at a time; if others fill it, this waits
        for room. Raises TypeError for a single prompt or request in place of a list.
        """
        asked = _listed(sequences)
        results: dict[int, Any] = {}
        rest = iter(range(len(asked)))

        async def work() -> None:
            for number in rest:
                results[number] = await self._process(asked[number])

        workers = min(len(asked), max(1, self._limits.waiting // 2))
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
        for number in range(len(asked)):
            if isinstance(failure := results[number], _Failure):
                if (note := f"of sequences[{number}]") not in getattr(failure.error, "__notes__", ()):
                    failure.error.add_note(note)
                raise failure.error
        return [results[number] for number in range(len(asked))]

    async def _process(self, request: Any) -> Any:
        """Return the result of one request; a `_Failure` if it failed and is not an `InferenceRequest`."""
        while True:
            try:
                if isinstance(request, InferenceRequest):
                    return await self.add_request(request)
                return await self.compute(request)
            except Exception as error:
                if isinstance(error, Overloaded) and error.__cause__ is None:
                    # The queue is full; an error with a cause means that the model is down.
                    await asyncio.sleep(error.retry_after or _PAUSE)
                    continue
                if not isinstance(request, InferenceRequest):
                    return _Failure(error)
                if not isinstance(error, BatchwrightError):
                    raise
                return failed_response(request, error)

    def _items(self, sequences: Sequence[Any]) -> list[Item]:
        return [
            Item(0.0, self._measure.length(each.prompt), max_tokens=each.max_tokens)
            if isinstance(each, InferenceRequest)
            else Item(0.0, self._measure.length(each))
            for each in _listed(sequences)
        ]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Error in place of an output."""

    error: Exception


def _listed(sequences: Sequence[Any]) -> list[Any]:
    if isinstance(sequences, (str, bytes, InferenceRequest)) or not isinstance(sequences, Iterable):
        raise TypeError(f"sequences of type {type(sequences).__name__}: must be a list of requests or sequences")
    listed = list(sequences)
    if listed and isinstance(listed[0], Integral):
        raise TypeError("sequences of token ids: must be a list of such lists, if only of one")
    return listed
