"""A deterministic `Inference` that can be told to wait or to fail, and that records its calls."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from batchwright.errors import BatchwrightError, GenerationError, ModelNotFound
from batchwright.inference.inference import Call
from batchwright.wire.classifying import RerankBody, classify_answer, read_classifying, rerank_answer, score_answer
from batchwright.wire.requests import (
    CHAT_URL,
    CLASSIFIER_URLS,
    EMBEDDINGS_URL,
    RESPONSES_URL,
    SCORE_URL,
    read_embeddings,
    read_generation,
)
from batchwright.wire.response_answers import ResponseEvents, response_of_chat
from batchwright.wire.text_responses import chat_of_response

MODEL = "stub"


class StubInference:
    """A model that answers a prompt with its words in capitals, at most `max_tokens` of them; a word is a token.

    A prompt that begins with "fail" fails; one that begins with "wait" waits for `go`. Closing `gate` holds lines of
    batches back, and opening it lets them through.
    """

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[Call] = []
        self.cancelled = 0
        self.waiting = 0
        self.closed = False
        self.raises: BatchwrightError | None = None

    @property
    def models(self) -> Sequence[str]:
        return (MODEL, "org/other")

    @property
    def wants(self) -> int:
        return 64

    async def answer(self, call: Call) -> dict[str, Any]:
        self.calls.append(call)
        if call.endpoint == EMBEDDINGS_URL:
            return self._embeddings(call)
        if call.endpoint in CLASSIFIER_URLS:
            return _classified(call)
        if call.endpoint == RESPONSES_URL:
            chat_call = replace(call, endpoint=CHAT_URL, body=chat_of_response(call.body))
            return response_of_chat(call.body, await self.answer(chat_call))
        chat, model, prompts, most = self._read(call)
        texts = [await self._computed(call, prompt, most) for prompt in prompts]
        choices = [
            {"index": index, "finish_reason": "stop"}
            | ({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
            for index, text in enumerate(texts)
        ]
        return self._head(call, chat, model) | {"choices": choices, "usage": _usage(prompts, texts)}

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        self.calls.append(call)
        if call.endpoint == RESPONSES_URL:
            body = chat_of_response(call.body) | {"stream_options": {"include_usage": True}}
            events = ResponseEvents(call.body)
            async for chunk in self.stream(replace(call, endpoint=CHAT_URL, body=body)):
                for event in events.of_chunk(chunk):
                    yield event
            return
        chat, model, prompts, most = self._read(call)
        head = self._head(call, chat, model)
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        text = await self._computed(call, prompts[0], most)
        for word in text.split():
            part = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            yield head | {"choices": [{"index": 0, "finish_reason": None, **part}], "usage": None}
            if word == "PAUSE":
                await self._wait()
            if word == "BREAK":
                raise GenerationError("the stub broke")
        last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        yield head | {"choices": [{"index": 0, "finish_reason": "stop", **last}], "usage": None}
        if (call.body.get("stream_options") or {}).get("include_usage"):
            yield head | {"choices": [], "usage": _usage(prompts, [text])}

    async def close(self) -> None:
        self.closed = True

    def _read(self, call: Call) -> tuple[bool, str, list[str], int]:
        body = read_generation(call.body, chat=call.endpoint == CHAT_URL)
        if body.model not in (None, *self.models):
            raise ModelNotFound(f"model={body.model!r} is not served here: choose from {', '.join(self.models)}")
        prompts = [_text(prompt) for prompt in body.prompts]
        return body.chat, body.model or MODEL, prompts, body.params(1000).max_tokens

    async def _computed(self, call: Call, prompt: str, most: int) -> str:
        if self.raises is not None:
            raise self.raises
        try:
            if call.traffic == "batch":
                await self.gate.wait()
            if prompt.startswith("wait"):
                await self._wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if prompt.startswith("fail"):
            raise GenerationError("the stub was asked to fail")
        return " ".join(prompt.upper().split()[:most])

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            await self.go.wait()
        finally:
            self.waiting -= 1

    def _head(self, call: Call, chat: bool, model: str) -> dict[str, Any]:
        return {
            "id": f"stub-{call.request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 1_700_000_000,
            "model": model,
        }

    def _embeddings(self, call: Call) -> dict[str, Any]:
        body = read_embeddings(call.body)
        vectors = [[float(len(each)), 1.0] for each in body.inputs]
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": vector
                if body.encoding_format == "float"
                else base64.b64encode(struct.pack("<2f", *vector)).decode(),
            }
            for index, vector in enumerate(vectors)
        ]
        tokens = sum(map(len, body.inputs))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": body.model or MODEL, "usage": usage}


def _classified(call: Call) -> dict[str, Any]:
    """The score of a text or pair is its number of characters."""
    body = read_classifying(call.endpoint, call.body)
    scores = [float(sum(map(len, each)) if isinstance(each, tuple) else len(each)) for each in body.inputs]
    model, tokens = body.model or MODEL, int(sum(scores))
    if isinstance(body, RerankBody):
        return rerank_answer("stub", model, body, scores, tokens)
    if call.endpoint == SCORE_URL:
        return score_answer("stub", 0, model, scores, tokens)
    return classify_answer("stub", 0, model, ["long"], [[score] for score in scores], tokens)


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return " ".join(str(item["content"]) if isinstance(item, dict) else str(item) for item in prompt)


def _usage(prompts: list[str], texts: list[str]) -> dict[str, int]:
    prompt_tokens = sum(len(prompt.split()) for prompt in prompts)
    completion_tokens = sum(len(text.split()) for text in texts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
