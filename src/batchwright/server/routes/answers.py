"""Bodies of the online endpoints, as the OpenAPI description tells of them.

What a request body means is judged by `wire/`, for online requests and for lines of batches alike; these schemas say
which fields there are. Answers are made by whatever computes; a client reads of them what is named here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

_TEXT = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_INPUTS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}
_COMMON: dict[str, Any] = {
    "model": {"type": ["string", "null"], "description": "One of `GET /v1/models`; left out: the first of them."},
    "priority": {"type": ["integer", "null"], "default": 5, "description": "Lower is sooner. Not OpenAI's."},
    "deadline_ms": {
        "type": ["number", "null"],
        "exclusiveMinimum": 0,
        "description": "Milliseconds after which the answer is of no use. Not OpenAI's.",
    },
    "user": {"type": ["string", "null"]},
}
_GENERATION: dict[str, Any] = {
    **_COMMON,
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 10, "default": 1},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": ["integer", "null"], "minimum": 0},
    "min_p": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128, "default": 1},
    "seed": {"type": ["integer", "null"]},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]},
    "presence_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": ["number", "null"], "minimum": 0.01, "maximum": 10},
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "stream": {"type": ["boolean", "null"], "default": False},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": {"type": ["boolean", "null"], "default": False}},
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": _TEXT,
        "content": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                    },
                },
            ]
        },
    },
}


def _object(title: str, required: str, **properties: Any) -> WithJsonSchema:
    return WithJsonSchema({"title": title, "type": "object", "required": [required], "properties": properties})


ChatBody = Annotated[
    dict[str, Any],
    _object(
        "ChatCompletionRequest",
        "messages",
        messages={"type": "array", "items": _MESSAGE, "minItems": 1},
        max_completion_tokens={"type": ["integer", "null"], "minimum": 1},
        logprobs={"type": ["boolean", "null"]},
        top_logprobs={"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        **_GENERATION,
    ),
]
CompletionBody = Annotated[
    dict[str, Any],
    _object(
        "CompletionRequest",
        "prompt",
        prompt=_INPUTS,
        logprobs={"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        **_GENERATION,
    ),
]
EmbeddingsBody = Annotated[
    dict[str, Any],
    _object(
        "EmbeddingsRequest",
        "input",
        input=_INPUTS,
        encoding_format={"enum": ["float", "base64", None]},
        dimensions={"type": ["integer", "null"], "minimum": 1},
        **_COMMON,
    ),
]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Usage(_Open):
    """Tokens, by the model's tokenizer."""

    prompt_tokens: int
    total_tokens: int


class GenerationUsage(Usage):
    completion_tokens: int


class ChatMessage(_Open):
    role: str
    content: str | None


class ChatChoice(_Open):
    index: int
    message: ChatMessage
    finish_reason: str | None


class ChatCompletion(_Open):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GenerationUsage


class TextChoice(_Open):
    index: int
    text: str
    finish_reason: str | None


class Completion(_Open):
    """The answer to prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: GenerationUsage


class Embedding(_Open):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Base64 of little-endian float32 where that was asked for."""


class Embeddings(_Open):
    """The vectors of the inputs, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage
