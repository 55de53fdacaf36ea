"""What computes behind the service, as its customers see it: how it is asked, and which answers are right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from tests.crash.outside import FAILING, answer_to, usage_of, vector_of

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)


class Model(Protocol):
    """A model of each kind of endpoint."""

    def body(self, endpoint: str, question: str) -> dict[str, Any]:
        """The request. One for a question that begins with `FAILING` is valid, and refused when it is computed."""
        ...

    def check(self, endpoint: str, question: str, answer: Mapping[str, Any]) -> None:
        """Raise `AssertionError` when the body of an answer is not as it must be."""
        ...


class Oracle:
    """The endpoint of `Outside`: each question has one right answer."""

    def body(self, endpoint: str, question: str) -> dict[str, Any]:
        return {"model": "oracle"} | _asking(endpoint, question)

    def check(self, endpoint: str, question: str, answer: Mapping[str, Any]) -> None:
        usage, expected = answer["usage"], usage_of(question)
        if endpoint == EMBEDDINGS:
            assert answer["data"][0]["embedding"] == vector_of(question), question
            assert usage["prompt_tokens"] == expected["prompt_tokens"]
        else:
            assert _text(endpoint, answer) == answer_to(question), question
            assert {name: usage[name] for name in expected} == expected


class Engine:
    """The default models of the service's own engine: answers must be well-formed."""

    max_tokens = 8
    """Of each answer."""
    max_model_len = 256
    """For the flag of that name: a question that is refused is longer."""
    _width = 384

    def body(self, endpoint: str, question: str) -> dict[str, Any]:
        if question.startswith(FAILING):
            question += " too long" * self.max_model_len
        limit = {} if endpoint == EMBEDDINGS else {"max_tokens": self.max_tokens}
        model = "minilm" if endpoint == EMBEDDINGS else "smollm2-135m"
        return {"model": model} | _asking(endpoint, question) | limit

    def check(self, endpoint: str, question: str, answer: Mapping[str, Any]) -> None:
        usage = answer["usage"]
        assert 0 < usage["prompt_tokens"] <= self.max_model_len, answer
        if endpoint == EMBEDDINGS:
            vector = answer["data"][0]["embedding"]
            assert len(vector) == self._width, answer
            assert all(math.isfinite(each) for each in vector), answer
            return
        assert isinstance(_text(endpoint, answer), str), answer
        assert answer["choices"][0]["finish_reason"] in ("stop", "length"), answer
        assert 0 < usage["completion_tokens"] <= self.max_tokens, answer


def _asking(endpoint: str, question: str) -> dict[str, Any]:
    if endpoint == CHAT:
        return {"messages": [{"role": "user", "content": question}]}
    return {"prompt" if endpoint == COMPLETIONS else "input": question}


def _text(endpoint: str, answer: Mapping[str, Any]) -> Any:
    choice = answer["choices"][0]
    return choice["message"]["content"] if endpoint == CHAT else choice["text"]
