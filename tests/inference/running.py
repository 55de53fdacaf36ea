"""Asynchronous tests in real time, which real connections and engines need. A test that hangs is ended."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(asyncio.wait_for(work, 120))


async def until(reached: Callable[[], bool]) -> None:
    """Wait for something that no event tells."""
    while True:
        if reached():
            return
        await asyncio.sleep(0.005)


def in_real_time(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Make a test of an asynchronous function."""

    @functools.wraps(test)
    def bounded(*args: _P.args, **options: _P.kwargs) -> None:
        run(test(*args, **options))

    return bounded
