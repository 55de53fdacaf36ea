"""Bodies of the online endpoints, as the OpenAPI description tells of them.

What a request body means is judged by `wire/`, for online requests and for lines of batches alike; these schemas say
which fields there are. Answers are made by whatever computes; a client reads of them what is named here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from batchwright.request import MAX_TOP_LOGPROBS
from batchwright.wire.fields import DEFAULT_PRIORITY, IGNORED, REFUSED
from batchwright.wire.requests import MAX_INPUTS

_TEXT = {"type": "string"}
_MAX_TOKEN = 2**31 - 1
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN}, "minItems": 1}
_WHOLE = {"type": ["integer", "null"]}
_NUMBER = {"type": ["number", "null"]}
_FLAG = {"type": ["boolean", "null"]}


def _inputs(shortest: int) -> dict[str, Any]:
    """One text or list of token ids, or several, each text with at least so many characters."""
    text = {"type": "string", "minLength": shortest}
    many = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
    return {"anyOf": [text, {**many, "items": text}, _TOKENS, {**many, "items": _TOKENS}]}


_COMMON: dict[str, Any] = {
    **{name: {} for name in IGNORED},
    "model": {
        "type": ["string", "null"],
        "minLength": 1,
        "pattern": r"^[^\u0000]*$",
        "description": "One of `GET /v1/models`; left out: the first of them.",
    },
    "priority": {
        **_WHOLE,
        "default": DEFAULT_PRIORITY,
        "description": "Lower is sooner; of 64 bits. Not OpenAI's.",
    },
    "deadline_ms": {
        **_NUMBER,
        "exclusiveMinimum": 0,
        "maximum": 1e12,
        "description": "Milliseconds after which the answer is of no use. Not OpenAI's.",
    },
    "deadline": {**_NUMBER, "exclusiveMinimum": 0, "maximum": 1e9, "description": "The same in seconds."},
}
_GENERATION: dict[str, Any] = {
    **{name: {"enum": [None, *values]} for name, values in REFUSED.items()},
    **_COMMON,
    "max_tokens": {**_WHOLE, "minimum": 1},
    "min_tokens": {**_WHOLE, "minimum": 0, "description": "At most `max_tokens`. Not OpenAI's."},
    "temperature": {**_NUMBER, "minimum": 0, "maximum": 10, "default": 1},
    "top_p": {**_NUMBER, "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    "top_k": {**_WHOLE, "minimum": -1, "maximum": 2**31 - 1},
    "min_p": {**_NUMBER, "minimum": 0, "maximum": 1},
    "n": {**_WHOLE, "minimum": 1, "maximum": 128, "default": 1},
    "seed": {**_WHOLE, "description": "Of 64 bits."},
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}},
            {"type": "null"},
        ]
    },
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}},
    "ignore_eos": _FLAG,
    "presence_penalty": {**_NUMBER, "minimum": -2, "maximum": 2},
    "frequency_penalty": {**_NUMBER, "minimum": -2, "maximum": 2},
    "repetition_penalty": {**_NUMBER, "minimum": 0.01, "maximum": 10},
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stream": {**_FLAG, "default": False},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {**_FLAG, "default": False}}},
}
_CONTENT = {
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
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": _TEXT},
    "anyOf": [
        {"required": ["content"], "properties": {"content": _CONTENT}},
        {
            "required": ["tool_calls"],
            "properties": {"content": {"type": "null"}, "tool_calls": {"type": "array", "minItems": 1}},
        },
    ],
}
_ONE_DEADLINE = {"anyOf": [{"properties": {name: {"type": "null"}}} for name in ("deadline", "deadline_ms")]}
_TOP_NEEDS_LOGPROBS = {
    "anyOf": [
        {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
        {"properties": {"top_logprobs": {"enum": [None, 0]}}},
    ]
}


def _object(title: str, required: str, *rules: dict[str, Any], **properties: Any) -> WithJsonSchema:
    return WithJsonSchema(
        {
            "title": title,
            "type": "object",
            "required": [required],
            "properties": properties,
            # Null is the same as left out, whatever the name.
            "additionalProperties": {"type": "null"},
            "allOf": [_ONE_DEADLINE, *rules],
        }
    )


ChatBody = Annotated[
    dict[str, Any],
    _object(
        "ChatCompletionRequest",
        "messages",
        _TOP_NEEDS_LOGPROBS,
        **_GENERATION
        | {
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "max_completion_tokens": {**_WHOLE, "minimum": 1},
            "logprobs": _FLAG,
            "top_logprobs": {**_WHOLE, "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        },
    ),
]
CompletionBody = Annotated[
    dict[str, Any],
    _object(
        "CompletionRequest",
        "prompt",
        **_GENERATION
        | {
            "prompt": _inputs(0),
            "max_completion_tokens": {**_WHOLE, "minimum": 1},
            "logprobs": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        },
    ),
]
EmbeddingsBody = Annotated[
    dict[str, Any],
    _object(
        "EmbeddingsRequest",
        "input",
        **_COMMON
        | {
            "input": _inputs(1),
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": {**_WHOLE, "minimum": 1, "maximum": 2**31 - 1},
        },
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
