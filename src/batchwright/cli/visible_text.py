"""Safe display on a terminal of foreign text, such as prompts, names and errors."""

from __future__ import annotations

_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    """Return `text` with its control characters escaped, which a terminal would obey."""
    return text.translate(_CONTROLS)
