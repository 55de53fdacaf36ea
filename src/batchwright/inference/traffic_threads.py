"""Threads for tokenizing, so that neither the event loop nor the model waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from batchwright.errors import EngineClosed
from batchwright.request import Traffic

_P = ParamSpec("_P")
_T = TypeVar("_T")


class TrafficThreads:
    """A thread for each class of traffic: an online request never queues behind the lines of a batch."""

    def __init__(self) -> None:
        self._closed = False
        self._threads: dict[Traffic, ThreadPoolExecutor] = {
            "online": ThreadPoolExecutor(1, thread_name_prefix="batchwright-online"),
            "batch": ThreadPoolExecutor(1, thread_name_prefix="batchwright-batch"),
        }

    async def run(self, traffic: Traffic, function: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
        """What `function` gives, or raises, in the thread of `traffic`, one after the other.

        Raises `EngineClosed` after `close`.
        """
        if self._closed:
            raise EngineClosed("the model was closed before the request came")
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[traffic], lambda: function(*args, **options)
        )

    def close(self) -> None:
        """Let the threads end when they are done."""
        self._closed = True
        for thread in self._threads.values():
            thread.shutdown(wait=False)
