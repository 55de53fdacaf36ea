"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading


class BackgroundLoop:
    """Runs until `stop`. The thread is a daemon: it does not keep the process alive."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self.loop,), name="batchwright-batcher", daemon=True)
        self._thread.start()
        # `is_running` is asked of it from now on.
        started = threading.Event()
        self.loop.call_soon_threadsafe(started.set)
        started.wait()

    def stop(self) -> None:
        """End the thread. What runs on the loop is cancelled. May be called again, and from the loop itself."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """This process was forked from the one whose loop it is: keep its copy untouched, since closing it there would
        close it here too, as far as the kernel is concerned."""
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
