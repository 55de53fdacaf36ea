"""`EmbeddingInference`: embeddings, computed by an `Encoder` behind a batcher in this process."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from batchwright.batcher import Batcher
from batchwright.encoder.encoder import Encoder
from batchwright.errors import DeadlineExceeded, InvalidRequest
from batchwright.inference.calls import InFlight, TrafficThreads, all_of, chosen_model, time_left
from batchwright.inference.inference import Call, Route
from batchwright.padding.rectangle import Ids
from batchwright.policies.auto import Goodput
from batchwright.policies.orders import EvenBatches, FairShare
from batchwright.policies.policy import Item, Policy
from batchwright.request import Flow
from batchwright.wire.fields import DEFAULT_PRIORITY
from batchwright.wire.requests import EMBEDDINGS_URL, EmbeddingsBody, read_embeddings
from batchwright.wire.responses import Embedding, embeddings_body, encode_vectors

_WANTED = 256
"""Batch lines to hold, so that batches are full while the next lines are fetched."""
_BATCH_INPUTS = 2048
"""Most inputs of batch lines in the batcher at once; the rest of its queue is for online requests."""
_REQUEST_INPUTS = 64
"""Most inputs of one request in the batcher at once: one batch, for which another request of its owner may wait."""
_BATCH_SIZE = 64
_BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Tokens of a batch. New requests wait for the end of the running batch, and larger batches hardly gain anything."""
_PIECE = 32
"""Inputs tokenized, or vectors encoded, in one piece; other requests get their turn between pieces."""
_LINES = "lines of batches"
_LINES_WEIGHT = 0.05
"""Weight of all batch lines together, relative to an online owner of weight 1."""
_DOUBLINGS = 5
"""Most steps of priority that count; each doubles or halves the weight of an input."""


class EmbeddingInference(Route):
    """Serves one embedding model. Inputs of all requests are computed in shared batches.

    Owners share the model fairly by tokens; all batch lines together are one owner with a small weight. `names` as for
    `EngineInference`.
    """

    endpoints = frozenset({EMBEDDINGS_URL})

    def __init__(self, encoder: Encoder, names: Sequence[str] = ()) -> None:
        self.encoder = encoder
        shape = EvenBatches(Goodput(_BATCH_SIZE, _BATCH_TOKENS[encoder.device_type]))
        policy = Policy(shape, order=FairShare(weight_of=_weight))
        self.batcher = Batcher(encoder, policy=policy, max_waiting=sys.maxsize, length=len)
        self._names = tuple(names) or (encoder.model_name,)
        self._threads = TrafficThreads()
        self._held = InFlight()
        self._batch_inputs = asyncio.Semaphore(_BATCH_INPUTS)

    @property
    def models(self) -> Sequence[str]:
        return self._names

    @property
    def room(self) -> int:
        return _WANTED - self._held["batch"]

    async def answer(self, call: Call) -> dict[str, Any]:
        body = read_embeddings(call.body)
        model = chosen_model(body.model, self._names)
        self.encoder.require_dimensions(body.dimensions)
        left = time_left(call, body.deadline)
        until = math.inf if left is None else asyncio.get_running_loop().time() + left
        with self._held.hold(call.traffic):
            sequences: list[Ids] = []
            for start in range(0, len(body.inputs), _PIECE):
                sequences += await self._threads.run(call.traffic, self._encoded, body, start)
            places = self._batch_inputs if call.traffic == "batch" else asyncio.Semaphore(_REQUEST_INPUTS)
            computed = await all_of([self._vector(call, ids, body.priority, until, places) for ids in sequences])
            vectors = [self.encoder.shortened(vector, body.dimensions) for vector in computed]
            embeddings: list[Embedding] = []
            for start in range(0, len(vectors), _PIECE):
                piece = vectors[start : start + _PIECE]
                embeddings += await self._threads.run(call.traffic, encode_vectors, piece, body.encoding_format)
        return embeddings_body(model, embeddings, sum(map(len, sequences)))

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise InvalidRequest("stream is not possible with embeddings: leave it out", param="stream")

    async def close(self) -> None:
        self._threads.close()
        await self.batcher.close(drain=False)

    async def _vector(
        self, call: Call, ids: Ids, priority: int, until: float, places: asyncio.Semaphore
    ) -> npt.NDArray[np.float32]:
        flow = call.flow or Flow(call.request_id, call.request_id)
        tenant = (_LINES, _LINES_WEIGHT) if call.traffic == "batch" else (flow.owner, flow.weight)
        async with places:
            left = until - asyncio.get_running_loop().time()
            if left <= 0.0:
                raise DeadlineExceeded("the time for this request was over before all of it was begun")
            vector: npt.NDArray[np.float32] = await self.batcher.compute(
                ids, priority=priority, deadline=None if left == math.inf else left, tenant=tenant
            )
        return vector

    def _encoded(self, body: EmbeddingsBody, start: int) -> list[Ids]:
        """Tokenize the piece of the inputs that begins at `start`."""
        sequences: list[Ids] = []
        for position, ids in enumerate(self.encoder.tokenizer.encode_many(body.inputs[start : start + _PIECE]), start):
            if isinstance(ids, InvalidRequest):
                raise type(ids)(f"input[{position}]: {ids}", param="input") from ids
            sequences.append(ids)
        return sequences


def _weight(item: Item) -> float:
    owner, weight = cast("tuple[str, float]", item.tenant)
    # The priority of a batch line never raises its weight, or it could outweigh online requests.
    most = 0 if owner == _LINES else _DOUBLINGS
    steps = max(-_DOUBLINGS, min(DEFAULT_PRIORITY - item.priority, most))
    return weight * 2.0**steps
