"""Calls from one event loop into another, which may end before they are answered, and a loop for callers without one.

`asyncio.run` cancels all remaining tasks when its own has returned, and then goes on for a few turns, in which others
may still hand something over. So a call is distinct from its task: its answer comes from the task or, when the loop
ends, from whoever notices that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

_Watched = TypeVar("_Watched")

MOVED: Final = object()
"""Answer of a call whose event loop has ended: the request must be entered again."""


class CrossLoopCall:
    """One request in the event loop `loop`, from a caller elsewhere. Cancelling `answer` cancels it there."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None

    def begin(self, work: Callable[[], Coroutine[Any, Any, Any]], *, turns: int = 0) -> None:
        """Have the loop run `work`, whose result is the answer, after `turns` turns."""
        try:
            self._loop.call_soon_threadsafe(self._start, work, turns)
        except RuntimeError:
            # The loop was closed just now.
            self.move(self._loop)

    def move(self, loop: asyncio.AbstractEventLoop) -> None:
        """Record that `loop` ends: if it is this call's, the request must be entered again. Called from any thread."""
        if loop is self._loop:
            self._give(MOVED)

    def _start(self, work: Callable[[], Coroutine[Any, Any, Any]], turns: int) -> None:
        if turns:
            self._loop.call_soon(self._start, work, turns - 1)
        elif not self.answer.done():
            self._task = self._loop.create_task(self._run(work))
            self._task.add_done_callback(self._end)
            self.answer.add_done_callback(self._cancel)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            result = await work()
        except Exception as error:
            # The caller may be gone, or the end of the loop may have been noticed.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self.answer.set_exception(error)
        else:
            self._give(result)

    def _end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            # It was cancelled before its first step, or by its caller.
            self._give(MOVED)

    def _cancel(self, answer: concurrent.futures.Future[Any]) -> None:
        """Cancel the work: the caller is gone, or the loop is no longer needed."""
        if self._task is not None and not self._task.done():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _give(self, result: Any) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.answer.set_result(result)


def watch_end(watched: _Watched, ended: weakref.WeakMethod[Callable[[_Watched], None]]) -> object:
    """Call `ended(watched)` when the running event loop ends, as long as the returned object is kept.

    If it is not kept, the call may still come when that loop runs again: `ended` must know by `watched` whether it is
    too late.
    """
    watch = _last_words(weakref.ref(watched), ended)
    with contextlib.suppress(StopIteration):
        # Its first step, which registers it with the loop, does not wait.
        watch.asend(None).send(None)
    return watch


async def _last_words(
    watched: weakref.ref[_Watched], ended: weakref.WeakMethod[Callable[[_Watched], None]]
) -> AsyncGenerator[None]:
    # An event loop that ends properly closes the asynchronous generators that were started in it.
    try:
        yield
    finally:
        about, notify = watched(), ended()
        if about is not None and notify is not None:
            notify(about)


class BackgroundLoop:
    """An event loop in a daemon thread, which runs until `stop` and does not keep the process alive."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self.loop,), name="batchwright-batcher", daemon=True)
        self._thread.start()
        # `is_running` may be called from now on.
        started = threading.Event()
        self.loop.call_soon_threadsafe(started.set)
        started.wait()

    def stop(self) -> None:
        """End the thread, cancelling what runs on the loop. May be called repeatedly, and from the loop itself."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """Leave the copy of the loop untouched in a forked process, since closing it there would also close it here, as
        far as the kernel is concerned."""
        _OF_PARENTS.append(self)


_OF_PARENTS: list[BackgroundLoop] = []


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    finally:
        loop.close()
