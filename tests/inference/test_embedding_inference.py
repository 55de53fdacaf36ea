"""Embeddings by the real encoder, and several models behind one `Inference`."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse

from batchwright import Encoder
from batchwright.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    InputError,
    InvalidRequest,
    ModelNotFound,
)
from batchwright.inference import embedding_inference
from batchwright.inference.embedding_inference import EmbeddingInference
from batchwright.inference.inference import Call
from batchwright.inference.routing import RoutedInference
from batchwright.request import Traffic
from batchwright.wire.requests import EncodingFormat
from batchwright.wire.responses import Embedding, encode_vectors

from .running import in_real_time

URL = "/v1/embeddings"


def call(traffic: Traffic = "online", *, timeout: float | None = None, **body: Any) -> Call:
    return Call(URL, body, "req_1", traffic, timeout)


def vectors(body: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.array([entry["embedding"] for entry in body["data"]], np.float32)


@in_real_time
async def test_vectors_are_the_encoders_own(encoder: Encoder, texts: list[str]) -> None:
    asked = [text for text in texts if text]
    ids = encoder.tokenizer.encode(asked[0])

    inference = EmbeddingInference(encoder, ["minilm"])
    answers = [
        await inference.answer(call(input=asked, model="minilm")),
        await inference.answer(call("batch", input=asked[0], dimensions=encoder.dim)),
        await inference.answer(call(input=ids, encoding_format="base64")),
    ]
    await inference.close()
    several, one, coded = answers
    parsed = CreateEmbeddingResponse.model_validate(several, strict=True)
    assert parsed.usage.prompt_tokens == sum(len(encoder.tokenizer.encode(text)) for text in asked)
    np.testing.assert_allclose(vectors(several), encoder.encode(asked), atol=1e-5)
    np.testing.assert_allclose(vectors(one)[0], vectors(several)[0], atol=1e-5)
    assert (one["model"], one["usage"]["total_tokens"]) == ("minilm", len(ids))
    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, vectors(one)[0], atol=1e-5)


@in_real_time
async def test_large_answers_are_made_in_pieces_and_not_on_the_event_loop(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[tuple[str, int]] = []

    def encode(vectors: Sequence[Any], encoding_format: EncodingFormat) -> Sequence[Embedding]:
        pieces.append((threading.current_thread().name, len(vectors)))
        return encode_vectors(vectors, encoding_format)

    monkeypatch.setattr(embedding_inference, "encode_vectors", encode)
    asked = [f"sky {number}" for number in range(70)]

    inference = EmbeddingInference(encoder)
    answer = await inference.answer(call(input=asked))
    await inference.close()
    np.testing.assert_allclose(vectors(answer), encoder.encode(asked), atol=1e-5)
    assert [count for _, count in pieces] == [32, 32, 6]
    assert all(name.startswith("batchwright-online") for name, _ in pieces)


@pytest.mark.parametrize("priorities", [(5, 5), (-(10**6), 10**6)])
@in_real_time
async def test_requests_are_computed_together_and_online_ones_first(
    priorities: tuple[int, int], encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_batch, of_online = priorities
    batches: list[list[int]] = []
    own = encoder.generate_batch

    def generate_batch(prompts: list[Any]) -> list[Any]:
        batches.append([len(prompt) for prompt in prompts])
        return own(prompts)

    monkeypatch.setattr(encoder, "generate_batch", generate_batch)
    long, short = "sky " * 20, "sky"

    inference = EmbeddingInference(encoder)
    await inference.answer(call(input="warm"))
    batches.clear()
    line = call("batch", input=long, priority=of_batch)
    lines = [asyncio.ensure_future(inference.answer(line)) for _ in range(200)]
    online = asyncio.ensure_future(inference.answer(call(input=[short] * 3, priority=of_online)))
    await online
    assert not all(line.done() for line in lines), "it waited for all lines of the batch"
    assert inference.wants == 256 - sum(not line.done() for line in lines)
    await asyncio.gather(*lines)
    assert inference.wants == 256
    await inference.close()
    assert max(map(len, batches)) > 1


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({"input": "a", "dimensions": 5}, InvalidRequest, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 2}, InvalidRequest, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 257}, InvalidRequest, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 10**25}, InvalidRequest, "priority"),
        ({"input": ["a", "sky " * 400]}, ContextLengthExceeded, "input"),
        ({"input": [[1], [10**6]]}, InvalidRequest, "input"),
        ({"input": "\ud800"}, InvalidRequest, "input"),
    ],
)
@in_real_time
async def test_what_can_never_be_computed(
    encoder: Encoder, body: dict[str, Any], kind: type[InvalidRequest], param: str
) -> None:
    inference = EmbeddingInference(encoder)
    with pytest.raises(kind) as caught:
        await inference.answer(call(**body))
    assert type(caught.value) is kind
    assert caught.value.param == param
    await inference.close()


@in_real_time
async def test_what_else_is_refused(encoder: Encoder) -> None:
    inference = EmbeddingInference(encoder, ["minilm"])
    with pytest.raises(ModelNotFound):
        await inference.answer(call(input="a", model="other"))
    with pytest.raises(DeadlineExceeded):
        await inference.answer(call(input="a", timeout=0.0))
    with pytest.raises(InvalidRequest, match="stream"):
        inference.stream(call(input="a"))
    await inference.close()
    with pytest.raises(EngineClosed):
        await inference.answer(call(input="a"))


class Echo:
    """A route that says which it is."""

    def __init__(self, name: str, endpoints: Sequence[str], models: Sequence[str], room: int) -> None:
        self.name, self.endpoints, self.models, self.room = name, endpoints, models, room
        self.closed = False

    @property
    def wants(self) -> int:
        return max(0, self.room)

    async def answer(self, call: Call) -> dict[str, Any]:
        return {"route": self.name} | ({"model": call.body["model"]} if "model" in call.body else {})

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        yield await self.answer(call)

    async def close(self) -> None:
        self.closed = True


@in_real_time
async def test_calls_go_where_their_endpoint_and_model_are() -> None:
    chat, small, embed = (
        Echo("chat", ["/v1/chat/completions"], ["big", "both"], 5),
        Echo("small", ["/v1/chat/completions"], ["small"], -3),
        Echo("embed", [URL], ["minilm", "both"], 4),
    )
    routed = RoutedInference([chat, small, embed])

    async def route(endpoint: str, **body: Any) -> str:
        asked = Call(endpoint, body, "r")
        (chunk,) = [chunk async for chunk in routed.stream(asked)]
        assert chunk == await routed.answer(asked)
        return str(chunk["route"])

    assert await route("/v1/chat/completions") == "chat"
    assert await route("/v1/chat/completions", model="small") == "small"
    assert await route("/v1/chat/completions", model="both") == "chat"
    assert await route(URL, model="both") == "embed"
    with pytest.raises(ModelNotFound, match="choose from big, both, small"):
        await route("/v1/chat/completions", model="huge")
    with pytest.raises(ModelNotFound, match="does not serve /v1/chat/completions"):
        await route("/v1/chat/completions", model="minilm")
    with pytest.raises(InvalidRequest, match="no model here serves /v1/completions"):
        await route("/v1/completions")
    assert routed.models == ["big", "both", "small", "minilm"]
    assert routed.wants == 6
    chat.room = -20
    assert routed.wants == 0
    await routed.close()
    assert chat.closed
    assert embed.closed


@in_real_time
async def test_an_alias_stands_for_a_model_and_in_its_answers() -> None:
    chat = Echo("chat", ["/v1/chat/completions"], ["big"], 5)
    embed = Echo("embed", [URL], ["minilm"], 4)
    routed = RoutedInference([chat, embed], {"gpt-4o": "big", "ada": "minilm"})

    assert routed.models == ["big", "minilm", "gpt-4o", "ada"]
    for model, endpoint, route in (("gpt-4o", "/v1/chat/completions", "chat"), ("ada", URL, "embed")):
        asked = Call(endpoint, {"model": model}, "r")
        told = {"route": route, "model": model}
        assert await routed.answer(asked) == told
        assert [chunk async for chunk in routed.stream(asked)] == [told]
        assert asked.body == {"model": model}
    with pytest.raises(ModelNotFound, match="model='gpt-4o' does not serve"):
        await routed.answer(Call(URL, {"model": "gpt-4o"}, "r"))
    with pytest.raises(ModelNotFound, match="choose from minilm, ada"):
        await routed.answer(Call(URL, {"model": "gpt-5"}, "r"))
    with pytest.raises(ModelNotFound):
        await routed.answer(Call(URL, {"model": "gpt-4"}, "r"))


@pytest.mark.parametrize(
    ("aliases", "told"), [({"big": "big"}, "is the name of a model"), ({"a": "b"}, "no such model")]
)
def test_an_alias_that_leads_nowhere_is_refused_at_the_start(aliases: dict[str, str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        RoutedInference([Echo("chat", ["/v1/chat/completions"], ["big"], 5)], aliases)


@in_real_time
async def test_vectors_are_shortened_where_the_model_was_trained_for_it(
    minilm_path: Path, texts: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "nested"
    shutil.copytree(minilm_path, folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"matryoshka_dimensions": [64, 128]}))
    encoder = Encoder(folder)
    asked = [text for text in texts if text][:3]
    beginnings = encoder.encode(asked)[:, :64]
    expected = beginnings / np.linalg.norm(beginnings, axis=1, keepdims=True)

    inference = EmbeddingInference(encoder)
    answer = await inference.answer(call(input=asked, dimensions=64))
    with pytest.raises(InvalidRequest, match="one of 64, 128") as caught:
        await inference.answer(call(input=asked, dimensions=65))
    await inference.close()
    assert caught.value.param == "dimensions"
    np.testing.assert_allclose(vectors(answer), expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode(asked, dimensions=64), expected, atol=1e-5)


@in_real_time
async def test_long_texts_are_cut_if_the_request_says_to_what(encoder: Encoder) -> None:
    inference = EmbeddingInference(encoder)
    long = "sky " * 400
    for most, words in ((-1, 254), (10, 8)):
        answer = await inference.answer(call(input=[long, "a"], truncate_prompt_tokens=most))
        assert answer["usage"]["prompt_tokens"] == words + 2 + 3
        np.testing.assert_allclose(vectors(answer), encoder.encode(["sky " * words, "a"]), atol=1e-5)
    await inference.close()
