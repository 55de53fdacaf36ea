"""Estimates of how much a request asks for, before it is read in full and tokenized.

Four bytes or characters count as a token. That is the average for English text; actual use is counted once it is known,
and lines of batches are only ever estimated. Values that make no sense count little or nothing: they are refused when
the body is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from batchwright.wire.classifying import pair_fields
from batchwright.wire.fields import stated_limit
from batchwright.wire.requests import (
    CHAT_URL,
    CLASSIFY_URL,
    EMBEDDINGS_URL,
    ENCODER_URLS,
    RERANK_URL,
    RESPONSES_URL,
    SCORE_URL,
)

_encode = msgspec.json.Encoder().encode
_PER_TOKEN = 4
_LARGEST = 2**31 - 1
_INPUTS = {EMBEDDINGS_URL: "input", CLASSIFY_URL: "input", RERANK_URL: "documents"}
"""Fields that contain the texts to encode."""
_ANSWER = 256
"""Tokens assumed for an answer whose length the request does not bound."""


def tokens_of_bytes(size: int) -> int:
    """Return the estimated tokens of a text of this many bytes."""
    return -(-size // _PER_TOKEN)


def bytes_of_tokens(tokens: int) -> int:
    """Return the bytes of a text of this many estimated tokens."""
    return tokens * _PER_TOKEN


def sequences_of_request(endpoint: str, body: Mapping[str, Any]) -> int:
    """Return the number of texts or pairs that an online request has encoded, or its prompts times their completions;
    at least 1.
    """
    prompts = 1 if endpoint == RESPONSES_URL else len(_prompts(endpoint, body))
    return prompts * completions_of_request(endpoint, body)


def completions_of_request(endpoint: str, body: Mapping[str, Any]) -> int:
    """Return the number of completions of each prompt of an online request; 1 for a text to encode."""
    return 1 if endpoint in ENCODER_URLS else _whole(body.get("n")) or 1


def prompt_tokens_of_request(endpoint: str, body: Mapping[str, Any]) -> int:
    """Return the estimated tokens of an online request's prompts or texts to encode."""
    prompts = _prompts(endpoint, body)
    tokens = sum(map(_tokens, prompts))
    if endpoint in (CHAT_URL, RESPONSES_URL):
        return tokens + _beside_prompt(body)
    if endpoint == RERANK_URL:
        return tokens + len(prompts) * _tokens(body.get("query"))
    if endpoint == SCORE_URL:
        first = body.get(pair_fields(body)[0])
        return tokens + (sum(map(_tokens, first)) if isinstance(first, list) else len(prompts) * _tokens(first))
    return tokens


def tokens_of_request(endpoint: str, body: Mapping[str, Any]) -> int:
    """Return the estimated tokens of an online request's prompts and of the longest answers that it allows."""
    prompts = prompt_tokens_of_request(endpoint, body)
    if endpoint in ENCODER_URLS:
        return prompts
    stated = stated_limit(body)
    longest = _ANSWER if stated is None else max(1, stated)  # 0: the prompt is scored, not answered
    return prompts + sequences_of_request(endpoint, body) * longest


def _prompts(endpoint: str, body: Mapping[str, Any]) -> list[Any]:
    """Texts, lists of token ids, or one list of messages; the two parts of the one prompt of a response."""
    if endpoint == CHAT_URL:
        return [body.get("messages")]
    if endpoint == RESPONSES_URL:
        return [body.get("instructions"), body.get("input")]
    name = pair_fields(body)[1] if endpoint == SCORE_URL else _INPUTS.get(endpoint, "prompt")
    given = body.get(name)
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return given
    return [given]


def _beside_prompt(body: Mapping[str, Any]) -> int:
    """Return the tokens of what templates and providers add to the prompt of a chat: its tools, and the schema of its
    answer in OpenAI's forms. Schemas in vLLM's forms are never added.
    """
    text = body.get("text")
    written = [
        None if body.get("tool_choice") == "none" else body.get("tools"),
        body.get("functions"),
        body.get("response_format"),
        text.get("format") if isinstance(text, Mapping) else None,
    ]
    try:
        return sum(tokens_of_bytes(len(_encode(each))) for each in written if each)
    except (ValueError, OverflowError, TypeError, RecursionError):
        return 0  # it cannot be written as JSON: the body is refused when it is read


def _tokens(prompt: Any) -> int:
    if isinstance(prompt, str):
        return tokens_of_bytes(len(prompt))
    if isinstance(prompt, dict):
        return _tokens(str(prompt.get("text", "")))
    if not isinstance(prompt, list):
        return 0
    return len(prompt) if prompt and isinstance(prompt[0], int) else sum(map(_of_message, prompt))


def _of_message(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return sum(_tokens(part.get("text")) for part in content if isinstance(part, dict))
    return _tokens(content) if isinstance(content, str) else 0


def _whole(value: object) -> int:
    # Bounded, since JSON may contain numbers with thousands of digits.
    return min(value, _LARGEST) if isinstance(value, int) and value > 0 else 0
