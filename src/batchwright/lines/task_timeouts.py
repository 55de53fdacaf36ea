"""One timeout for very many tasks, with one timer for all of them."""

from __future__ import annotations

import asyncio
from typing import Any


class TaskTimeouts:
    """Cancels tasks that take longer than `seconds`, which is the same for all: so the oldest is always the next.

    `asyncio.timeout` for each of them would cost a third of what a line costs otherwise.
    """

    def __init__(self, seconds: float | None) -> None:
        """`seconds`: most for a task; None: they may take as long as they like."""
        self.seconds = seconds
        self._started: dict[asyncio.Task[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._late: set[asyncio.Task[Any]] = set()

    def begin(self, task: asyncio.Task[Any]) -> None:
        """Start the time of `task`."""
        if self.seconds is None:
            return
        loop = task.get_loop()
        self._started[task] = now = loop.time()
        if self._timer is None:
            self._timer = loop.call_at(now + self.seconds, self._look, loop)

    def end(self, task: asyncio.Task[Any]) -> bool:
        """Stop the time of `task`. Returns whether it was cancelled for being late."""
        self._started.pop(task, None)
        if task not in self._late:
            return False
        self._late.discard(task)
        return True

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.seconds is not None
        due = loop.time() - self.seconds
        while self._started:
            task, started = next(iter(self._started.items()))
            if started > due:
                self._timer = loop.call_at(started + self.seconds, self._look, loop)
                return
            del self._started[task]
            self._late.add(task)
            task.cancel()
        self._timer = None
