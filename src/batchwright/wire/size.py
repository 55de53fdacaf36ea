"""How much a body asks for, estimated before it is read in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CHARACTERS = 4
"""Of a text for each token, roughly."""


def inputs_of(body: Mapping[str, Any]) -> int:
    """Number of sequences that a body asks for: texts to embed, or prompts times completions. At least 1.

    What is not as it should be counts as one: whoever reads the body in full refuses it.
    """
    given = body.get("prompt", body.get("input"))
    prompts = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
    return prompts * _completions(body)


def prompt_tokens_of(body: Mapping[str, Any]) -> int:
    """Number of tokens of the prompts, once for each of their completions.

    Estimated: a quarter of their characters, and token ids as they are.
    """
    tokens = 0
    for name in ("prompt", "input", "messages"):
        given = body.get(name, [])
        tokens += sum(map(_tokens, given)) if isinstance(given, list) else _tokens(given)
    return tokens * _completions(body)


def _completions(body: Mapping[str, Any]) -> int:
    n = body.get("n")
    return n if isinstance(n, int) and 1 <= n <= 2**31 else 1


def _tokens(item: object) -> int:
    if isinstance(item, str):
        return len(item) // _CHARACTERS + 1
    if isinstance(item, list):
        return sum(map(_tokens, item)) if item and not isinstance(item[0], int) else len(item)
    if isinstance(item, dict):
        return _tokens(item.get("content", item.get("text")))
    return 1
