"""Values of foreign bodies in messages."""

from __future__ import annotations

_LONGEST = 100


def shown(value: object) -> str:
    """`repr`, short, and also where `repr` raises (an integer of more than 4300 digits does)."""
    try:
        text = repr(value)
    except ValueError:
        return f"({type(value).__name__})"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
