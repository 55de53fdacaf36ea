"""Helpers for tests of code that uses batchers: an event loop in which time passes only when every task waits.

    def test_a_lone_request_goes_after_its_longest_wait() -> None:
        async def main(clock: ManualClock) -> float:
            await SimpleBatcher(model, max_wait_ms=100, clock=clock).add_request("hello")
            return clock.now()

        assert play(main) == 0.1

`asyncio.sleep` and timers work as usual and cost no time. Computation costs no virtual time either.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from batchwright.clock import ManualClock

_T = TypeVar("_T")


class Stuck(Exception):
    """Nothing is left to do, and the test is not over: a task waits for ever."""


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Stuck
            self._clock.advance(max(0.0, timeout))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is that of `clock`, which jumps to the next timer when there is nothing else to do.

    Work in threads is not waited for: use models and callers that are coroutines.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(_Selector(self.clock))

    def time(self) -> float:
        return self.clock.now()


def play(main: Callable[[ManualClock], Coroutine[Any, Any, _T]]) -> _T:
    """Run `main` in virtual time. Raises `Stuck` when it waits for something that will never happen."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop.clock))
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
