"""`EmbeddingInference`: embeddings, computed by an `Encoder` behind a batcher in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batchwright.encoder.encoder import Encoder
from batchwright.errors import InvalidRequest
from batchwright.inference.calls import chosen_model
from batchwright.inference.encoder_inference import PIECE, REMEDY, EncoderInference, Vector
from batchwright.inference.inference import Call
from batchwright.padding.rectangle import Ids
from batchwright.wire.classifying import PairsBody, RerankBody, read_rerank, read_score, rerank_answer, score_answer
from batchwright.wire.requests import EMBEDDINGS_URL, PAIR_URLS, RERANK_URL, WHOLE_LENGTH, read_embeddings
from batchwright.wire.responses import Embedding, embeddings_body, encode_vectors, short_floats

_TINY = np.float32(1e-12)
"""Length below which a vector counts as zero, whose similarity to all others is 0."""


class EmbeddingInference(EncoderInference):
    """Serves one embedding model; `/v1/rerank` and `/v1/score` by the cosine similarity of its vectors."""

    endpoints = PAIR_URLS | {EMBEDDINGS_URL}

    def __init__(
        self, encoder: Encoder, names: Sequence[str] = (), *, unix_time: Callable[[], float] = time.time
    ) -> None:
        super().__init__(encoder, names)
        self.encoder = encoder
        encoder.tokenizer.remedy = REMEDY
        self._unix_time = unix_time

    async def answer(self, call: Call) -> dict[str, Any]:
        return await (self._embedded(call) if call.endpoint == EMBEDDINGS_URL else self._compared(call))

    async def _embedded(self, call: Call) -> dict[str, Any]:
        body = read_embeddings(call.body)
        model = chosen_model(body.model, self._names)
        self.encoder.require_dimensions(body.dimensions)
        most = self._most(body.most_tokens)
        until = self._until(call, body.deadline)
        with self._held.hold(call.traffic):
            sequences = await self._tokenized(call, "input", body.inputs, most)
            computed = await self._vectors(call, sequences, body.priority, until)
            vectors = [self.encoder.shortened(vector, body.dimensions) for vector in computed]
            embeddings: list[Embedding] = []
            for start in range(0, len(vectors), PIECE):
                piece = vectors[start : start + PIECE]
                embeddings += await self._threads.run(call.traffic, encode_vectors, piece, body.encoding_format)
        return embeddings_body(model, embeddings, sum(map(len, sequences)))

    async def _compared(self, call: Call) -> dict[str, Any]:
        body: PairsBody = read_rerank(call.body) if call.endpoint == RERANK_URL else read_score(call.body)
        model = chosen_model(body.model, self._names)
        most = self._most(body.most_tokens)
        until = self._until(call, body.deadline)
        with self._held.hold(call.traffic):
            sequences = await self._tokenized(call, body.first_param, body.first, most)
            sequences += await self._tokenized(call, body.param, body.second, most)
            vectors = await self._vectors(call, sequences, body.priority, until)
            scores = await self._threads.run(call.traffic, _similarities, vectors, len(body.first))
        key, tokens = call.request_id.removeprefix("req_"), sum(map(len, sequences))
        if isinstance(body, RerankBody):
            return rerank_answer(key, model, body, scores, tokens)
        return score_answer(key, int(self._unix_time()), model, scores, tokens)

    def _most(self, most_tokens: int | None) -> int | None:
        most = self.encoder.max_length if most_tokens == WHOLE_LENGTH else most_tokens
        self.encoder.tokenizer.require_room(most)
        return most

    async def _tokenized(
        self, call: Call, param: str, inputs: Sequence[str | list[int]], most: int | None
    ) -> list[Ids]:
        sequences: list[Ids] = []
        for start in range(0, len(inputs), PIECE):
            sequences += await self._threads.run(call.traffic, self._encoded, param, inputs, start, most)
        return sequences

    def _encoded(self, param: str, inputs: Sequence[str | list[int]], start: int, most: int | None) -> list[Ids]:
        """Tokenize the piece of the inputs that begins at `start`."""
        sequences: list[Ids] = []
        piece = inputs[start : start + PIECE]
        for position, ids in enumerate(self.encoder.tokenizer.encode_many(piece, most), start):
            if isinstance(ids, InvalidRequest):
                raise type(ids)(f"{param}[{position}]: {ids}", param=param) from ids
            sequences.append(ids)
        return sequences


def _similarities(vectors: Sequence[Vector], first: int) -> list[float]:
    """Return the cosine similarities of the `first` vectors, one for all or one for each, to the others."""
    rows = np.stack(vectors).astype(np.float32, copy=False)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
    return short_floats(np.sum(rows[:first] * rows[first:], axis=1))
