"""Closing what yields, at once: an iterator that is only dropped holds its place until it is collected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


async def close(iterator: AsyncIterator[Any]) -> None:
    """Close it, if it can be closed."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


@asynccontextmanager
async def closing(iterator: AsyncIterator[_T]) -> AsyncIterator[AsyncIterator[_T]]:
    """As `contextlib.aclosing`, for any asynchronous iterator."""
    try:
        yield iterator
    finally:
        await close(iterator)
