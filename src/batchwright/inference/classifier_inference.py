"""`ClassifierInference`: ranks, scores and labels, computed by a `Classifier` behind a batcher in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np

from batchwright.encoder.classifier import Classifier
from batchwright.encoder.pairs import TypedTokens
from batchwright.errors import InvalidRequest
from batchwright.inference.calls import chosen_model
from batchwright.inference.encoder_inference import PIECE, REMEDY, EncoderInference, Vector
from batchwright.inference.inference import Call
from batchwright.wire.classifying import (
    ClassifierBody,
    RerankBody,
    classify_answer,
    read_classifying,
    rerank_answer,
    score_answer,
)
from batchwright.wire.requests import CLASSIFIER_URLS, CLASSIFY_URL, RERANK_URL, WHOLE_LENGTH
from batchwright.wire.responses import short_floats


class ClassifierInference(EncoderInference):
    """Serves one sequence classifier: `/classify`, and `/v1/rerank` and `/v1/score` if it has one label."""

    def __init__(
        self, classifier: Classifier, names: Sequence[str] = (), *, unix_time: Callable[[], float] = time.time
    ) -> None:
        super().__init__(classifier, names)
        self.classifier = classifier
        classifier.tokenizer.remedy = REMEDY
        self._unix_time = unix_time

    @property
    def endpoints(self) -> Collection[str]:
        return CLASSIFIER_URLS if self.classifier.scores_pairs else {CLASSIFY_URL}

    async def answer(self, call: Call) -> dict[str, Any]:
        body = read_classifying(call.endpoint, call.body)
        model = chosen_model(body.model, self._names)
        most = self.classifier.max_length if body.most_tokens == WHOLE_LENGTH else body.most_tokens
        self.classifier.tokenizer.require_room(most)
        until = self._until(call, body.deadline)
        with self._held.hold(call.traffic):
            sequences: list[TypedTokens] = []
            for start in range(0, len(body.inputs), PIECE):
                sequences += await self._threads.run(call.traffic, self._encoded, body, start, most)
            logits = np.stack(await self._vectors(call, sequences, body.priority, until))
            return await self._threads.run(call.traffic, self._answer, call, body, model, logits, sequences)

    def _answer(
        self, call: Call, body: ClassifierBody, model: str, logits: Vector, sequences: Sequence[TypedTokens]
    ) -> dict[str, Any]:
        key, created = call.request_id.removeprefix("req_"), int(self._unix_time())
        tokens = sum(map(len, sequences))
        settings = self.classifier.settings
        if call.endpoint == CLASSIFY_URL:
            flat = short_floats(settings.probabilities(logits).reshape(-1))
            width = len(settings.labels)
            rows = [flat[start : start + width] for start in range(0, len(flat), width)]
            return classify_answer(key, created, model, settings.labels, rows, tokens)
        scores = short_floats(settings.scores(logits))
        if call.endpoint == RERANK_URL:
            return rerank_answer(key, model, cast("RerankBody", body), scores, tokens)
        return score_answer(key, created, model, scores, tokens)

    def _encoded(self, body: ClassifierBody, start: int, most: int | None) -> list[TypedTokens]:
        """Tokenize the piece of the inputs that begins at `start`."""
        found: list[TypedTokens] = []
        inputs = body.inputs[start : start + PIECE]
        for position, tokens in enumerate(self.classifier.tokenizer.encode_inputs(inputs, most), start):
            if isinstance(tokens, InvalidRequest):
                raise type(tokens)(f"{body.param}[{position}]: {tokens}", param=body.param) from tokens
            found.append(tokens)
        return found
