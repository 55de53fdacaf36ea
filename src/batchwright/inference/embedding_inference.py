"""`EmbeddingInference`: embeddings, computed by an `Encoder` behind a batcher in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchwright.encoder.encoder import Encoder
from batchwright.errors import InvalidRequest
from batchwright.inference.calls import chosen_model
from batchwright.inference.encoder_inference import PIECE, EncoderInference
from batchwright.inference.inference import Call
from batchwright.padding.rectangle import Ids
from batchwright.wire.requests import EMBEDDINGS_URL, WHOLE_LENGTH, EmbeddingsBody, read_embeddings
from batchwright.wire.responses import Embedding, embeddings_body, encode_vectors


class EmbeddingInference(EncoderInference):
    """Serves one embedding model."""

    endpoints = frozenset({EMBEDDINGS_URL})

    def __init__(self, encoder: Encoder, names: Sequence[str] = ()) -> None:
        super().__init__(encoder, names)
        self.encoder = encoder

    async def answer(self, call: Call) -> dict[str, Any]:
        body = read_embeddings(call.body)
        model = chosen_model(body.model, self._names)
        self.encoder.require_dimensions(body.dimensions)
        most = self.encoder.max_length if body.most_tokens == WHOLE_LENGTH else body.most_tokens
        self.encoder.tokenizer.require_room(most)
        until = self._until(call, body.deadline)
        with self._held.hold(call.traffic):
            sequences: list[Ids] = []
            for start in range(0, len(body.inputs), PIECE):
                sequences += await self._threads.run(call.traffic, self._encoded, body, start, most)
            computed = await self._vectors(call, sequences, body.priority, until)
            vectors = [self.encoder.shortened(vector, body.dimensions) for vector in computed]
            embeddings: list[Embedding] = []
            for start in range(0, len(vectors), PIECE):
                piece = vectors[start : start + PIECE]
                embeddings += await self._threads.run(call.traffic, encode_vectors, piece, body.encoding_format)
        return embeddings_body(model, embeddings, sum(map(len, sequences)))

    def _encoded(self, body: EmbeddingsBody, start: int, most: int | None) -> list[Ids]:
        """Tokenize the piece of the inputs that begins at `start`."""
        sequences: list[Ids] = []
        inputs = body.inputs[start : start + PIECE]
        for position, ids in enumerate(self.encoder.tokenizer.encode_many(inputs, most), start):
            if isinstance(ids, InvalidRequest):
                raise type(ids)(f"input[{position}]: {ids}", param="input") from ids
            sequences.append(ids)
        return sequences
