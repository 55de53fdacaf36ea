"""`EncoderInference`: the common base of the routes to encoders, a batcher that requests share fairly."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from batchwright.batcher import Batcher
from batchwright.encoder.pairs import TypedTokens
from batchwright.errors import DeadlineExceeded, InvalidRequest
from batchwright.inference.calls import InFlight, TrafficThreads, all_of, time_left
from batchwright.inference.inference import Call, Route
from batchwright.padding.rectangle import Ids
from batchwright.policies.auto import Goodput
from batchwright.policies.orders import EvenBatches, FairShare
from batchwright.policies.policy import Item, Policy
from batchwright.request import Flow
from batchwright.wire.fields import DEFAULT_PRIORITY

_WANTED = 256
"""Batch lines to hold, so that batches are full while the next lines are fetched."""
_BATCH_INPUTS = 2048
"""Most inputs of batch lines in the batcher at once; the rest of its queue is for online requests."""
_REQUEST_INPUTS = 64
"""Most inputs of one request in the batcher at once: one batch, for which its owner's next request may have to wait."""
_BATCH_SIZE = 64
_BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536}
"""Tokens of a batch. New requests wait for the running batch to end, and larger batches hardly gain anything."""
PIECE = 32
"""Inputs tokenized, or vectors encoded, at a time; other requests get their turn in between."""
_LINES = "lines of batches"
_LINES_WEIGHT = 0.05
"""Weight of all batch lines together, relative to an online owner of weight 1."""
REMEDY = '"truncate_prompt_tokens": -1 in the body cuts it'
"""Remedy for a text that is too long."""
_DOUBLINGS = 5
"""Most steps of priority that have an effect; each doubles or halves the weight of an input."""

Vector = npt.NDArray[np.float32]


class EncodingModel(Protocol):
    """A model that computes a vector for each sequence of a batch."""

    model_name: str
    device_type: str

    def generate_batch(self, prompts: list[Any]) -> list[Vector | InvalidRequest]: ...


class EncoderInference(Route):
    """Base class of the routes to one encoder. Inputs of all requests are computed in shared batches.

    Owners share the model fairly by tokens; all batch lines together are one owner with a small weight. `names` is as
    in `EngineInference`.
    """

    def __init__(self, model: EncodingModel, names: Sequence[str] = ()) -> None:
        shape = EvenBatches(Goodput(_BATCH_SIZE, _BATCH_TOKENS[model.device_type]))
        policy = Policy(shape, order=FairShare(weight_of=_weight))
        self.batcher = Batcher(model, policy=policy, max_waiting=sys.maxsize, length=len)
        self._names = tuple(names) or (model.model_name,)
        self._threads = TrafficThreads()
        self._held = InFlight()
        self._batch_inputs = asyncio.Semaphore(_BATCH_INPUTS)

    @property
    def models(self) -> Sequence[str]:
        return self._names

    @property
    def room(self) -> int:
        return _WANTED - self._held["batch"]

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise InvalidRequest(f"stream is not possible with {call.endpoint}: leave it out", param="stream")

    async def close(self) -> None:
        self._threads.close()
        await self.batcher.close(drain=False)

    def _until(self, call: Call, deadline: float | None) -> float:
        """Return the event loop's time by which a call with this `deadline` in seconds must have been started.

        Raises `DeadlineExceeded`.
        """
        left = time_left(call, deadline)
        return math.inf if left is None else asyncio.get_running_loop().time() + left

    async def _vectors(
        self, call: Call, sequences: Sequence[Ids | TypedTokens], priority: int, until: float
    ) -> list[Vector]:
        """Compute the vectors of sequences, in order; equal sequences are computed once, so that they get equal
        vectors.

        The last digits of a vector depend on what is computed in the same batch.
        """
        places = self._batch_inputs if call.traffic == "batch" else asyncio.Semaphore(_REQUEST_INPUTS)
        contents = list(map(_content, sequences))
        distinct = dict(zip(contents, sequences, strict=True))
        found = await all_of([self._vector(call, each, priority, until, places) for each in distinct.values()])
        vectors = dict(zip(distinct, found, strict=True))
        return [vectors[each] for each in contents]

    async def _vector(
        self, call: Call, sequence: Any, priority: int, until: float, places: asyncio.Semaphore
    ) -> Vector:
        flow = call.flow or Flow(call.request_id, call.request_id)
        tenant = (_LINES, _LINES_WEIGHT) if call.traffic == "batch" else (flow.owner, flow.weight)
        async with places:
            left = until - asyncio.get_running_loop().time()
            if left <= 0.0:
                raise DeadlineExceeded("the time for this request was over before all of it was begun")
            vector: Vector = await self.batcher.compute(
                sequence, priority=priority, deadline=None if left == math.inf else left, tenant=tenant
            )
        return vector


def _content(sequence: Ids | TypedTokens) -> tuple[bytes, bytes]:
    """Return a key that is equal only for equal sequences."""
    if isinstance(sequence, TypedTokens):
        return sequence.ids.tobytes(), sequence.types.tobytes()
    return sequence.tobytes(), b""


def _weight(item: Item) -> float:
    owner, weight = cast("tuple[str, float]", item.tenant)
    # The priority of a batch line never raises its weight, or it could outweigh online requests.
    most = 0 if owner == _LINES else _DOUBLINGS
    steps = max(-_DOUBLINGS, min(DEFAULT_PRIORITY - item.priority, most))
    return weight * 2.0**steps
