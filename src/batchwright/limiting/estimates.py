"""How many tokens a request may use, before it is tokenized.

Four bytes or characters count as a token. That is what English text has on average; what was used is settled when it is
known, and lines of batches are only ever estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PER_TOKEN = 4
_ANSWER = 256
"""Tokens of an answer whose length is not bounded by the request."""


def tokens_of_bytes(size: int) -> int:
    """The tokens of a text of so many bytes."""
    return -(-size // _PER_TOKEN)


def tokens_of_request(body: Mapping[str, Any]) -> int:
    """The tokens of the prompts of an online request and of the longest answers that it allows.

    What makes no sense counts nothing: whoever reads the body refuses it.
    """
    if "input" in body:
        return sum(map(_tokens, _prompts(body["input"])))
    if "messages" in body:
        messages = body["messages"] if isinstance(body["messages"], list) else []
        prompts, count = sum(map(_of_message, messages)), 1
    else:
        given = _prompts(body.get("prompt"))
        prompts, count = sum(map(_tokens, given)), len(given)
    longest = _whole(body.get("max_completion_tokens")) or _whole(body.get("max_tokens")) or _ANSWER
    return prompts + count * (_whole(body.get("n")) or 1) * longest


def _prompts(given: Any) -> list[Any]:
    """One text or one list of token ids, or a list of these."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return given
    return [given]


def _tokens(prompt: Any) -> int:
    if isinstance(prompt, str):
        return tokens_of_bytes(len(prompt))
    return len(prompt) if isinstance(prompt, list) else 0


def _of_message(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return sum(_tokens(part.get("text")) for part in content if isinstance(part, dict))
    return _tokens(content)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
