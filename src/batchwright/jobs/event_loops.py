"""Running the coroutines of a job from a plain function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

_T = TypeVar("_T")


def run_coroutine(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` on an event loop of its own: in another thread if this one runs a loop, as in notebooks.

    KeyboardInterrupt cancels it, and is raised when it has ended.
    """
    if not _in_event_loop():
        return asyncio.run(work)
    stop: list[Callable[[], object]] = []

    async def cancellable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        stop.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="batchwright-run") as thread:
        result = thread.submit(asyncio.run, cancellable())
        try:
            return result.result()
        except KeyboardInterrupt:
            for each in stop:
                each()
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
