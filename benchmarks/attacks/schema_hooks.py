"""Hooks for schemathesis: what JSON Schema cannot say of a request, and what would take the run's time."""

from __future__ import annotations

from typing import Any

import schemathesis

_TOKENS = 4
_VOCABULARY = 1000
"""Token ids below it are in every model."""


@schemathesis.hook
def filter_body(context: schemathesis.HookContext, body: Any) -> bool:
    """Whether to send a body: in a form, a number arrives as a text, which a file may be."""
    file = body.get("file") if isinstance(body, dict) else None
    return file is None or isinstance(file, (str, bytes))


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: dict[str, Any]) -> None:
    """Change a valid body into one that can be computed, and quickly."""
    if isinstance(case.body, dict):
        body = case.body = _plain(case.body)
        _bound_numbers(body)
        _leave_out(body)
        for name in ("prompt", "input"):
            if name in body:
                body[name] = _known(body[name])
        if "prompt" in body:
            body["prompt"] = _with_tokens(body["prompt"])


def _bound_numbers(body: dict[str, Any]) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        if _whole(body.get(name)):
            body[name] = min(body[name], _TOKENS)
    if {"prompts", "messages", "prompt"} & body.keys():
        body.setdefault("max_tokens", _TOKENS)
    # min_tokens must be at most max_tokens, and n times the prompts at most 2,048.
    for name, most, largest in (("min_tokens", 1, 2**31 - 1), ("n", 2, 128)):
        if _whole(body.get(name)) and body[name] <= largest:
            body[name] = min(body[name], most)
    # Most JSON Schema implementations compare numbers as doubles, so the schema has no 64-bit bounds.
    for name in ("seed", "priority"):
        if isinstance(body.get(name), int) and abs(body[name]) >= 2**63:
            body[name] = 0


def _leave_out(body: dict[str, Any]) -> None:
    # A deadline may pass, and a vector has as many dimensions as the model gives it.
    for name in ("deadline", "deadline_ms", "dimensions"):
        value = body.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            body[name] = None
    # Most hosts have no global address here, and none should be called.
    if str(body.get("callback_url")).startswith("http"):
        body["callback_url"] = None


def _plain(value: Any) -> Any:
    """Return the value with whole numbers written as integers: JSON Schema accepts 1.0 as one, JSON readers do not."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _with_tokens(prompt: Any) -> Any:
    """Models may have no token for a control character, and none for an empty text."""
    if isinstance(prompt, list) and prompt and all(isinstance(each, str) for each in prompt):
        return [f"x{each}" for each in prompt]
    return f"x{prompt}" if isinstance(prompt, str) else prompt


def _known(value: Any) -> Any:
    """With token ids that models have."""
    if isinstance(value, list):
        return [_known(each) for each in value]
    return value % _VOCABULARY if _whole(value) and value < 2**31 else value
