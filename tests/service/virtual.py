"""An event loop in virtual time that waits for threads: time passes only when no thread works for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

from batchwright.clock import ManualClock
from batchwright.store.store import Store
from batchwright.testing import VirtualLoop

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")


class PatientLoop(VirtualLoop):
    """Counts what was handed to threads; while there is any, it waits for real."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = 0
        virtual: selectors.SelectSelector = self._selector  # type: ignore[attr-defined]
        jump = virtual.select

        def select(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if self.outstanding and timeout != 0:
                return selectors.SelectSelector.select(virtual, None)
            return jump(timeout)

        virtual.select = select  # type: ignore[method-assign]

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Arguments], _T], *args: *_Arguments
    ) -> asyncio.Future[_T]:
        future = super().run_in_executor(executor, func, *args)
        self.outstanding += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, future: asyncio.Future[Any]) -> None:
        self.outstanding -= 1


class Patient:
    """A store whose calls the loop waits for. `before` is awaited before each, with its name."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.before: Callable[[str], Coroutine[Any, Any, None]] = _nothing
        self.after: Callable[[str], Coroutine[Any, Any, None]] = _nothing

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **options: Any) -> Any:
            await self.before(name)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, PatientLoop)
            loop.outstanding += 1
            try:
                result = await method(*args, **options)
            finally:
                loop.outstanding -= 1
            await self.after(name)
            return result

        return call


async def _nothing(name: str) -> None:
    pass


def play(main: Callable[[ManualClock], Coroutine[Any, Any, _T]]) -> _T:
    """Run `main` in virtual time, threads being waited for."""
    loop = PatientLoop()
    try:
        return loop.run_until_complete(main(loop.clock))
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.outstanding += 1  # the thread that joins the others
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
