"""Bodies of responses, as the official client's own types read them."""

from __future__ import annotations

import base64
import math
from typing import Any, cast

import numpy as np
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from batchwright.request import Choice, InferenceResponse, TokenLogprob, Usage
from batchwright.wire.responses import Chunks, Head, completion_body, embeddings_body, encode_vectors

LOGPROBS = (
    TokenLogprob(1, "Grün", -0.5, ((1, "Grün", -0.5), (2, "�", -math.inf))),
    TokenLogprob(2, "�", -1.5, ()),
)
CHAT = Head("k", 1700000000, "m", chat=True, n=2)
TEXT = Head("k", 1700000000, "m", chat=False, n=2)


def response(*texts: str, logprobs: tuple[TokenLogprob, ...] | None = None) -> InferenceResponse:
    choices = tuple(Choice(index, text, (1, 2), "stop", logprobs) for index, text in enumerate(texts))
    return InferenceResponse("r", texts[0], 2, 1.0, 0.0, "stop", Usage(10, 2 * len(texts), 4), (1, 2), choices=choices)


def read(model: type[Any], body: dict[str, Any]) -> Any:
    """Strictly: every field of the right type, none unknown."""
    parsed = cast("BaseModel", model.model_validate(body, strict=True))
    assert not parsed.model_extra
    return parsed


def test_a_chat() -> None:
    body = read(ChatCompletion, completion_body(CHAT, [response("a", "b", logprobs=LOGPROBS)]))
    assert (body.id, body.object, body.created, body.model) == ("chatcmpl-k", "chat.completion", 1700000000, "m")
    assert [(c.index, c.message.content, c.finish_reason) for c in body.choices] == [(0, "a", "stop"), (1, "b", "stop")]
    first, second = body.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("Grün", -0.5, list("Grün".encode()))
    assert [(top.token, top.logprob, top.bytes) for top in first.top_logprobs][1] == ("�", -9999.0, None)
    assert second.bytes is None
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (10, 4, 14)
    assert body.usage.prompt_tokens_details.cached_tokens == 4


def test_what_computes_is_told_in_answers_and_chunks() -> None:
    head = Head("k", 1700000000, "m", chat=True, system_fingerprint="fp_1")
    assert read(ChatCompletion, completion_body(head, [response("a")])).system_fingerprint == "fp_1"
    (chunk,) = Chunks(head, include_usage=True).usage([Usage(1, 1, 0)])
    assert read(ChatCompletionChunk, chunk).system_fingerprint == "fp_1"
    text = Head("k", 1700000000, "m", chat=False, system_fingerprint="fp_1")
    assert read(Completion, completion_body(text, [response("a")])).system_fingerprint == "fp_1"


def test_a_completion_of_several_prompts() -> None:
    body = read(Completion, completion_body(TEXT, [response("a", "b"), response("c", "d", logprobs=LOGPROBS)]))
    assert (body.id, body.object) == ("cmpl-k", "text_completion")
    assert [(c.index, c.text) for c in body.choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert body.choices[0].logprobs is None
    assert body.choices[2].logprobs.tokens == ["Grün", "�"]
    assert body.choices[2].logprobs.text_offset == [0, 4]
    assert (body.usage.prompt_tokens, body.usage.completion_tokens) == (20, 8)


def test_a_streamed_chat() -> None:
    chunks = Chunks(CHAT, include_usage=True)
    bodies = [
        *chunks.text(1, ""),
        *chunks.text(1, "b"),
        *chunks.text(0, "a", logprobs=LOGPROBS[:1]),
        *chunks.text(1, ""),
        *chunks.text(1, "!", finish_reason="length"),
        *chunks.text(0, "", finish_reason="stop"),
        *chunks.usage([Usage(10, 4, 1)]),
    ]
    parsed = [read(ChatCompletionChunk, body) for body in bodies]
    assert {chunk.object for chunk in parsed} == {"chat.completion.chunk"}
    assert {chunk.id for chunk in parsed} == {"chatcmpl-k"}
    deltas = [
        (choice.index, choice.delta.role, choice.delta.content, choice.finish_reason)
        for chunk in parsed
        for choice in chunk.choices
    ]
    assert deltas == [
        (1, "assistant", "", None), (1, None, "b", None),
        (0, "assistant", "", None), (0, None, "a", None),
        (1, None, "!", None), (1, None, None, "length"),
        (0, None, None, "stop"),
    ]  # fmt: skip
    assert parsed[3].choices[0].logprobs.content[0].token == "Grün"
    assert all(body["usage"] is None for body in bodies[:-1])
    assert parsed[-1].choices == []
    assert parsed[-1].usage.total_tokens == 14


def test_a_streamed_completion() -> None:
    chunks = Chunks(TEXT, include_usage=False)
    bodies = [
        *chunks.text(3, "G", logprobs=LOGPROBS[:1]),
        *chunks.text(3, ""),
        *chunks.text(3, "x", logprobs=LOGPROBS[1:], finish_reason="stop"),
        *chunks.usage([Usage(1, 2)]),
    ]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [(3, "G", None), (3, "x", "stop")]
    assert [c["logprobs"]["text_offset"] for c in choices] == [[0], [4]]
    read(Completion, bodies[-1])
    assert not any("usage" in body for body in bodies)


def test_embeddings() -> None:
    vectors = [np.array([0.5, -1.25], np.float32), np.array([0.1, 2.0], np.float32)]
    plain = read(CreateEmbeddingResponse, embeddings_body("m", encode_vectors(vectors, "float"), 7))
    first = plain.data[0]
    assert (first.index, first.embedding, first.object) == (0, [0.5, -1.25], "embedding")
    assert plain.data[1].embedding == [0.1, 2.0]
    assert (plain.object, plain.model, plain.usage.prompt_tokens, plain.usage.total_tokens) == ("list", "m", 7, 7)
    coded = embeddings_body("m", encode_vectors(vectors, "base64"), 7)
    decoded = np.frombuffer(base64.b64decode(coded["data"][1]["embedding"]), "<f4")
    assert decoded.tolist() == vectors[1].tolist()
