"""Hooks for schemathesis: what JSON Schema cannot say of a request, and what would take the run's time."""

from __future__ import annotations

from typing import Any

import schemathesis

_TOKENS = 4
_VOCABULARY = 1000
"""Token ids below it are in every model."""


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Make a body that means what it says one that can be computed, and quickly."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if _whole(body.get(name)) and body[name] > _TOKENS:
            body[name] = _TOKENS
    if "prompts" in body or "messages" in body or "prompt" in body:
        body.setdefault("max_tokens", _TOKENS)
    # At most max_tokens, and no more than 2,048 completions of all prompts.
    for name, most in (("min_tokens", 1), ("n", 2)):
        if _whole(body.get(name)) and body[name] > most and body[name] <= 128:
            body[name] = most
    # Most that read JSON Schema compare numbers as doubles, so the schema has no bounds of 64 bits.
    for name in ("seed", "priority"):
        if isinstance(body.get(name), int) and abs(body[name]) >= 2**63:
            body[name] = 0
    # A deadline may pass, and a vector has as many dimensions as the model gives it.
    for name in ("deadline", "deadline_ms", "dimensions"):
        if isinstance(body.get(name), (int, float)) and not isinstance(body[name], bool) and body[name] > 0:
            body[name] = None
    # Most hosts have no global address here, and none is to be called.
    if isinstance(body.get("callback_url"), str) and body["callback_url"].startswith("http"):
        body["callback_url"] = None
    for name in ("prompt", "input"):
        if name in body:
            body[name] = _known(body[name])
    if body.get("prompt") == "" or body.get("prompt") == [""]:
        body["prompt"] = "x"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _known(value: Any) -> Any:
    """With token ids that models have."""
    if isinstance(value, list):
        return [_known(each) for each in value]
    return value % _VOCABULARY if _whole(value) and value < 2**31 else value
