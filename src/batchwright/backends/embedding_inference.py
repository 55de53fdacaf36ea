"""`EmbeddingInference`: embeddings, computed by an `Encoder` in this process behind a batcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from batchwright.backends.calls import Held, all_of, chosen_model, time_left
from batchwright.backends.encoder import Encoder
from batchwright.backends.inference import Call
from batchwright.backends.off_loop import TrafficThreads
from batchwright.batcher import Batcher
from batchwright.errors import InvalidRequest
from batchwright.padding.rectangle import Ids
from batchwright.request import Traffic
from batchwright.wire.requests import EMBEDDINGS_URL, EmbeddingsBody, read_embeddings
from batchwright.wire.responses import embeddings_body

_WANTED = 256
"""Batch lines held, so that batches are full while the next lines are fetched."""
_BATCH_INPUTS = 2048
"""Inputs of batch lines in the batcher at once; the rest of its queue is for online requests."""
_PATIENCE = 60
"""By so many steps of priority a batch line is less urgent: each counts as ten seconds, so it waits ten minutes at most
while online requests keep the model busy.
"""
_PRIORITIES = 20
"""Priorities further from 0 count as this one: no line asks for so much that it goes before an online request."""


class EmbeddingInference:
    """Serves one embedding model. Inputs of all requests are computed in common batches, online ones first.

    `names` as for `EngineInference`. More than `max_waiting` inputs that wait are refused with `Overloaded`.
    """

    endpoints = frozenset({EMBEDDINGS_URL})

    def __init__(self, encoder: Encoder, names: Sequence[str] = (), *, max_waiting: int = 20_000) -> None:
        self.encoder = encoder
        self.batcher = Batcher(encoder, max_waiting=max_waiting, length=len)
        self._names = tuple(names) or (encoder.model_name,)
        self._threads = TrafficThreads()
        self._held = Held()
        self._batch_inputs = asyncio.Semaphore(_BATCH_INPUTS)

    @property
    def models(self) -> Sequence[str]:
        return self._names

    @property
    def room(self) -> int:
        """`wants`, and below zero where it holds more than it would like to."""
        return _WANTED - self._held.batch

    @property
    def wants(self) -> int:
        return max(0, self.room)

    async def answer(self, call: Call) -> dict[str, Any]:
        body = read_embeddings(call.body)
        model = chosen_model(body.model, self._names)
        if body.dimensions not in (None, self.encoder.dim):
            raise InvalidRequest(
                f"dimensions={body.dimensions}: {model} has vectors of {self.encoder.dim}, which cannot be shortened",
                param="dimensions",
                code="unsupported_parameter",
            )
        left = time_left(call, body.deadline)
        with self._held.hold(call.traffic):
            sequences = await self._threads.run(call.traffic, self._encoded, body)
            urgency = _urgency(body.priority, call.traffic)
            vectors = await all_of([self._vector(call, ids, urgency, left) for ids in sequences])
        return embeddings_body(model, vectors, sum(map(len, sequences)), body.encoding_format)

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise InvalidRequest("stream is not possible with embeddings: leave it out", param="stream")

    async def close(self) -> None:
        self._threads.close()
        await self.batcher.close(drain=False)

    async def _vector(self, call: Call, ids: Ids, urgency: int, left: float | None) -> npt.NDArray[np.float32]:
        async with self._batch_inputs if call.traffic == "batch" else nullcontext():
            vector: npt.NDArray[np.float32] = await self.batcher.compute(ids, priority=urgency, deadline=left)
        return vector

    def _encoded(self, body: EmbeddingsBody) -> list[Ids]:
        """Token ids of the inputs."""
        sequences: list[Ids] = []
        for position, ids in enumerate(self.encoder.tokenizer.encode_many(body.inputs)):
            if isinstance(ids, InvalidRequest):
                raise type(ids)(f"input[{position}]: {ids}", param="input") from ids
            sequences.append(ids)
        return sequences


def _urgency(priority: int, traffic: Traffic) -> int:
    return max(-_PRIORITIES, min(priority, _PRIORITIES)) + (_PATIENCE if traffic == "batch" else 0)
