"""Computing lines with an `Inference`."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeAlias, TypeVar

from batchwright.clock import Clock
from batchwright.errors import BatchwrightError
from batchwright.inference.inference import Call, Inference
from batchwright.inference.metering import WaitsForBudget
from batchwright.lines.line_retries import Failures, RetryPolicy, nobody_computes, passing

_log = logging.getLogger(__name__)
_IN_A_ROW = 32
"""Lines that one task computes: if all of them fail at once, the task holds the event loop for that many lines."""
_SHOWN = 160
"""Characters of an error that `why_pausing` shows."""
LATEST = ", the last after: "
"""Text before an error in `why_pausing`."""
_Task: TypeAlias = asyncio.Task[None]
_Line = TypeVar("_Line")
Outcome: TypeAlias = dict[str, Any] | Exception | None
"""The body of the response, the error in its place, or None if the line was not tried to the end."""


class LineExecutor(Generic[_Line]):
    """Executes lines in as many tasks as the model wants, each of which computes one line after another.

    Lines are of any type, which `call_of` turns into calls.
    """

    def __init__(
        self,
        inference: Inference,
        *,
        call_of: Callable[[_Line, Callable[[Exception | None], None]], Call],
        done: Callable[[_Line, Outcome], None],
        following: Callable[[], _Line | None],
        timeout: float | None,
        retries: RetryPolicy,
        clock: Clock,
        draw: random.Random,
    ) -> None:
        """`call_of` makes the call of a line, given its `pauses`; an error that it raises is the outcome of the line.

        `done` is called with each line that ended, and its outcome; an error for which `nobody_computes` is true says
        nothing about the line. Then `following` returns the line to go on with, if any. Neither may raise.

        `timeout`: seconds for one try; None: any time.
        """
        self._inference = inference
        self._call_of = call_of
        self._done = done
        self._following = following
        self._timeouts = _TaskTimeouts(timeout)
        self._retries = retries
        self._clock = clock
        self._draw = draw
        self._tasks: dict[_Task, _Line] = {}
        self._pausing: dict[_Task, Exception] = {}
        """Tasks whose line failed and waits to be tried again, here or in the model, and why each failed."""
        self._last_tries = False
        self._waited_for: type[Exception] | None = None
        self._successes = 0
        self._in_vain = 0
        """Failures of lines since one succeeded."""
        self._failing_since = 0.0
        """Time of the first of these failures."""
        self._alone = asyncio.Lock()
        """Held by the only line that is tried again while all fail."""
        self._with_model = 0
        self.tried_again = 0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def lines(self) -> Iterable[_Line]:
        """Lines being computed."""
        return self._tasks.values()

    @property
    def room(self) -> int:
        """Number of further lines that the model wants. Lines on their way to it, and lines that wait to be tried
        again, hold their places.
        """
        return self._inference.wants - (len(self._tasks) - self._with_model)

    @property
    def all_fail(self) -> bool:
        """Whether so many lines in a row failed that only one at a time is tried again."""
        return self._in_vain >= self._retries.most_in_vain

    @property
    def failing_since(self) -> float | None:
        """Time since which all lines fail; None if they do not."""
        return self._failing_since if self.all_fail else None

    @property
    def why_pausing(self) -> str | None:
        """How many lines wait for money, or to be tried again, and the error of the latest; None if none does."""
        failures = [error for error in self._pausing.values() if not isinstance(error, WaitsForBudget)]
        unpaid = len(self._pausing) - len(failures)
        parts = [f"{unpaid:,} until there is room in the budget"] if unpaid else []
        if failures:
            latest = " ".join(str(failures[-1]).split())
            latest = latest if len(latest) <= _SHOWN else latest[: _SHOWN - 1] + "…"
            how = ", one at a time as all fail" if self.all_fail else ""
            parts.append(f"{len(failures):,} to be tried again{how}{LATEST}{latest}")
        return ", ".join(parts) or None

    def start(self, line: _Line) -> None:
        """Compute a line."""
        self._tasks[asyncio.create_task(self._compute(line))] = line

    def drop(self, wanted: Callable[[_Line], bool]) -> list[_Line]:
        """Stop computing the lines that are not wanted, and return them; `done` is not called for them."""
        dropped = [(task, line) for task, line in self._tasks.items() if not wanted(line)]
        for task, _ in dropped:
            del self._tasks[task]
            task.cancel()
        return [line for _, line in dropped]

    async def close(self) -> None:
        """Stop computing all lines, and wait until the inference holds none of them; `done` is not called for them."""
        tasks = [*self._tasks]
        self.drop(lambda line: False)
        await asyncio.gather(*tasks, return_exceptions=True)

    def try_no_more(self, besides: type[Exception] | None = None) -> None:
        """End lines that wait to be tried again, now or later, without an outcome. Those held up by `besides` go on."""
        self._last_tries, self._waited_for = True, besides
        for task in [task for task, error in self._pausing.items() if not self._waits_on(error)]:
            self._give_up(task)

    def _waits_on(self, error: Exception) -> bool:
        return self._waited_for is not None and isinstance(error, self._waited_for)

    def _pauses(self, task: _Task, error: Exception | None) -> None:
        self._pausing.pop(task, None)
        if error is None:
            return
        self._pausing[task] = error
        if self._last_tries and not self._waits_on(error):
            self._give_up(task)

    def _give_up(self, task: _Task) -> None:
        if (line := self._tasks.pop(task, None)) is not None:
            task.cancel()
            self._done(line, None)

    async def _compute(self, line: _Line) -> None:
        task = asyncio.current_task()
        assert task is not None
        for _ in range(_IN_A_ROW):
            outcome: Outcome = None
            try:
                outcome = await self._outcome(line, task)
            finally:
                self._pausing.pop(task, None)
                # If it is not there any more, the line was dropped.
                held = self._tasks.pop(task, None) is not None
                if held:
                    self._done(line, outcome)
            if not held or (following := self._following()) is None:
                return
            line = following
            self._tasks[task] = line
        del self._tasks[task]
        self.start(line)

    async def _outcome(self, line: _Line, task: _Task) -> Outcome:
        try:
            call = self._call_of(line, lambda error: self._pauses(task, error))
        except Exception as error:
            return error
        failures, delay = None, 0.0
        while True:
            try:
                return await (self._try(call, task) if failures is None else self._try_again(call, task, delay))
            except Exception as error:
                if nobody_computes(error) or not passing(error):
                    if not isinstance(error, (BatchwrightError, TimeoutError)):
                        _log.exception("%s failed", call.request_id)
                    return error
                self._note_failure()
                failures = failures or Failures()
                if not failures.may_go_on(self._retries, self._clock.now(), self._successes):
                    return error
                retry_after = getattr(error, "retry_after", None)
                # While all fail, the pause of each line depends on the failures of all, not on its own.
                in_a_row = max(failures.in_a_row, self._in_vain - self._retries.most_in_vain + 1)
                delay = self._retries.delay(in_a_row, retry_after, self._draw)
                self._pauses(task, error)

    def _note_failure(self) -> None:
        if not self._in_vain:
            self._failing_since = self._clock.now()
        self._in_vain += 1

    async def _try_again(self, call: Call, task: _Task, delay: float) -> dict[str, Any]:
        """Retry a line that failed, `delay` seconds after it may be its turn."""
        if self.all_fail:
            async with self._alone:
                if self.all_fail:
                    await asyncio.sleep(delay)
                    return await self._try_now(call, task)
        await asyncio.sleep(delay)
        return await self._try_now(call, task)

    async def _try_now(self, call: Call, task: _Task) -> dict[str, Any]:
        self.tried_again += 1
        self._pauses(task, None)
        return await self._try(call, task)

    async def _try(self, call: Call, task: _Task) -> dict[str, Any]:
        self._with_model += 1
        self._timeouts.begin(task)
        try:
            body = await self._inference.answer(call)
        except asyncio.CancelledError:
            if self._timeouts.end(task) and not task.uncancel():
                raise TimeoutError(f"This request took longer than {self._timeouts.seconds:g} s.") from None
            raise
        finally:
            self._with_model -= 1
            self._timeouts.end(task)
        self._successes += 1
        self._in_vain = 0
        return body


class _TaskTimeouts:
    """One timer that cancels every task that takes longer than `seconds`: the oldest task is always due first.

    `asyncio.timeout` for each task would add a third to the cost of a line.
    """

    def __init__(self, seconds: float | None) -> None:
        """`seconds` None: no task is ever cancelled."""
        self.seconds = seconds
        self._started: dict[_Task, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._late: set[_Task] = set()

    def begin(self, task: _Task) -> None:
        """Start the time of `task`."""
        if self.seconds is None:
            return
        loop = task.get_loop()
        self._started[task] = now = loop.time()
        if self._timer is None:
            self._timer = loop.call_at(now + self.seconds, self._look, loop)

    def end(self, task: _Task) -> bool:
        """Stop the time of `task`, and return whether the task was cancelled for being late."""
        self._started.pop(task, None)
        late = task in self._late
        self._late.discard(task)
        return late

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
