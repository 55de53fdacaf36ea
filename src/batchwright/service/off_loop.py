"""Execution of blocking work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


async def off_loop(work: Callable[[*_Arguments], _T], *arguments: *_Arguments) -> _T:
    """Run `work(*arguments)` in a thread, and return its result.

    A caller that is cancelled still waits for `work`, so that what `work` uses (a file, a buffer) is free afterwards.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        # Retrieved so that asyncio does not report an exception that was never retrieved.
        future.exception()
        raise
