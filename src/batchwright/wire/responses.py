"""Bodies of OpenAI responses, and the chunks of their streams."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from batchwright.request import Choice, FinishReason, InferenceResponse, TokenLogprob, Usage
from batchwright.wire.digits import short_floats
from batchwright.wire.requests import EncodingFormat

Body = dict[str, Any]
Embedding: TypeAlias = str | list[float]
"""A vector in an answer: base64, or its numbers."""

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI uses the same."""


@dataclass(frozen=True, slots=True)
class Head:
    """What stands in a response whatever came of it, and in each of its chunks."""

    key: str
    """Tells this response from all others; its `id` is made of it."""
    created: int
    """Unix seconds."""
    model: str
    chat: bool
    """Whether it is a chat completion (else a text completion)."""
    n: int = 1
    """Completions of each prompt: choice `i` of prompt `p` has the index `p·n + i`."""
    system_fingerprint: str | None = None
    """Tells what computes: as long as it is the same, so is the answer to a request with the same seed."""

    def body(self, choices: list[Body], *, chunk: bool = False) -> Body:
        """A body with these choices."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.key}",
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
            **({} if self.system_fingerprint is None else {"system_fingerprint": self.system_fingerprint}),
            "choices": choices,
        }


def completion_body(head: Head, responses: Sequence[InferenceResponse]) -> Body:
    """The whole answer, given the response to each prompt, in order."""
    choices = []
    for position, response in enumerate(responses):
        for choice in response.choices:
            index = position * head.n + choice.index
            choices.append(_chat_choice(index, choice) if head.chat else _text_choice(index, choice))
    return head.body(choices) | {"usage": _usage([response.usage for response in responses])}


class Chunks:
    """Makes the chunks of one stream, whose choices may come in any mixture."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        """`include_usage`: a last chunk without choices has the token counts, and all others a null for them."""
        self._head = head
        self._include_usage = include_usage
        self._offsets: dict[int, int] = {}
        """Of each choice that has begun: characters of the tokens that came, for `text_offset`."""

    def text(
        self,
        index: int,
        text: str,
        *,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> list[Body]:
        """New text of choice `index`, perhaps none, perhaps its last; in a chat the role goes before the first."""
        if not self._head.chat:
            if not (text or logprobs or finish_reason):
                return []
            return [self._chunk([self._text_choice(index, text, logprobs, finish_reason)])]
        deltas: list[tuple[Body, Body | None, FinishReason | None]] = []
        if index not in self._offsets:
            self._offsets[index] = 0
            deltas.append(({"role": "assistant", "content": "", "refusal": None}, None, None))
        if text or logprobs:
            deltas.append(({"content": text}, None if logprobs is None else _chat_logprobs(logprobs), None))
        if finish_reason is not None:
            deltas.append(({}, None, finish_reason))
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": named, "finish_reason": reason}])
            for delta, named, reason in deltas
        ]

    def usage(self, usages: Sequence[Usage]) -> list[Body]:
        """What ends the stream, given the token counts of each prompt."""
        return [self._head.body([], chunk=True) | {"usage": _usage(usages)}] if self._include_usage else []

    def _text_choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: FinishReason | None
    ) -> Body:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(entry.token) for entry in logprobs or ())
        named = None if logprobs is None else _text_logprobs(logprobs, offset)
        return {"index": index, "text": text, "logprobs": named, "finish_reason": finish_reason}

    def _chunk(self, choices: list[Body]) -> Body:
        body = self._head.body(choices, chunk=True)
        return body | {"usage": None} if self._include_usage else body


def embeddings_body(model: str, embeddings: Sequence[Embedding], prompt_tokens: int) -> Body:
    """The answer with the embedding of each input, in order."""
    data = [
        {"object": "embedding", "index": index, "embedding": embedding} for index, embedding in enumerate(embeddings)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def encode_vectors(vectors: Sequence[npt.NDArray[np.float32]], encoding_format: EncodingFormat) -> Sequence[Embedding]:
    """Vectors [dim] as they stand in an answer; there must be one. Base64 is that of little-endian float32.

    Numbers have no more digits than give the float32 back.
    """
    if encoding_format == "base64":
        return [base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode() for vector in vectors]
    size, floats = len(vectors[0]), short_floats(np.concatenate(vectors))
    return [floats[start : start + size] for start in range(0, len(floats), size)]


def _usage(usages: Sequence[Usage]) -> Body:
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def _chat_choice(index: int, choice: Choice) -> Body:
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if choice.logprobs is None else _chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(entries: Sequence[TokenLogprob]) -> Body:
    content = [
        {
            **_chat_token(entry.token, entry.logprob),
            "top_logprobs": [_chat_token(token, logprob) for _, token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: str, logprob: float) -> Body:
    # A token that holds a part of a character only has no text of its own, so its bytes are not known from it.
    known = "�" not in token
    return {
        "token": token,
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(token.encode()) if known else None,
    }


def _text_choice(index: int, choice: Choice) -> Body:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else _text_logprobs(choice.logprobs, 0),
        "finish_reason": choice.finish_reason,
    }


def _text_logprobs(entries: Sequence[TokenLogprob], offset: int) -> Body:
    """`offset`: characters of the tokens before these."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return {
        "tokens": [entry.token for entry in entries],
        "token_logprobs": [max(entry.logprob, _LEAST_LOGPROB) for entry in entries],
        "top_logprobs": [{token: max(logprob, _LEAST_LOGPROB) for _, token, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }
