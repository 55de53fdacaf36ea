"""Texts that are none: JSON can name half of a surrogate pair, which has no UTF-8 form and no token.

Python's own JSON reader lets one through. Nothing could compute it, store it, or send it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchwright.errors import InvalidRequest


def flaw_of(text: str) -> str | None:
    """What is wrong with a text; None when it has a UTF-8 form."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is half of a surrogate pair, which is no text"
    return None


def require_texts(body: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` naming a value of `body`, at whatever depth, that is no text: `messages[1].content`."""
    left: list[tuple[str, Mapping[str, Any] | list[Any]]] = [("", body)]
    while left:
        where, container = left.pop()
        is_list = isinstance(container, list)
        for key, value in enumerate(container) if isinstance(container, list) else container.items():
            if not isinstance(value, (str, list, dict)):
                continue
            path = f"{where}[{key}]" if is_list else f"{where}.{key}".removeprefix(".")
            if not isinstance(value, str):
                left.append((path, value))
            elif (flaw := flaw_of(value)) is not None:
                path = path.encode(errors="replace").decode()
                raise InvalidRequest(f"{path}: {flaw}", param=path)
