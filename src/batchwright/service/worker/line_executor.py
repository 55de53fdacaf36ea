"""Lines of batches that are being computed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from batchwright.clock import Clock
from batchwright.errors import BatchwrightError, DeadlineExceeded
from batchwright.inference.inference import Call, Inference
from batchwright.request import Flow
from batchwright.service.access.api_keys import bounded_priority
from batchwright.service.worker import output_lines
from batchwright.service.worker.line_retries import Failures, RetryPolicy, nobody_computes, passing
from batchwright.service.worker.task_timeouts import TaskTimeouts
from batchwright.store.records import ClaimedLine, LineResult
from batchwright.wire.error_bodies import hides_details

_log = logging.getLogger(__name__)
_IN_A_ROW = 32
"""Lines that a task computes: were all of them refused at once, it would hold the event loop for that long."""
_Task: TypeAlias = asyncio.Task[None]


class _InputLine(msgspec.Struct):
    """What computing needs of a line of an input."""

    body: dict[str, Any]


_decode = msgspec.json.Decoder(_InputLine).decode


class LineExecutor:
    """Computes lines, as many tasks at a time as the model wants: each takes up a line after the other."""

    def __init__(
        self,
        inference: Inference,
        *,
        done: Callable[[ClaimedLine, LineResult | None], None],
        following: Callable[[], tuple[ClaimedLine, bytes] | None],
        timeout: float | None,
        retries: RetryPolicy,
        clock: Clock,
        draw: random.Random,
    ) -> None:
        """`done` is called with each line that ended: with its result, or with None when nobody could compute it.
        Then `following` is asked for a line to go on with.

        `timeout`: seconds for one try.
        """
        self._inference = inference
        self._done = done
        self._following = following
        self._timeouts = TaskTimeouts(timeout)
        self._retries = retries
        self._clock = clock
        self._draw = draw
        self._tasks: dict[_Task, ClaimedLine] = {}
        self._pausing: set[_Task] = set()
        """Whose line failed and waits to be tried again, here or in the model."""
        self._last_tries = False
        self._successes = 0
        self._with_model = 0
        self.tried_again = 0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def room(self) -> int:
        """How many more lines the model would like to have. Those on their way to it are counted, and those that wait
        to be tried again: they hold their places.
        """
        return self._inference.wants - (len(self._tasks) - self._with_model)

    def start(self, line: ClaimedLine, content: bytes) -> None:
        """Compute a line, `content` being its bytes in the input."""
        task = asyncio.create_task(self._compute(line, content))
        self._tasks[task] = line

    def drop(self, wanted: Callable[[ClaimedLine], bool]) -> list[ClaimedLine]:
        """Stop computing the lines that are not wanted, and give them back; `done` is not called for them."""
        dropped = [(task, line) for task, line in self._tasks.items() if not wanted(line)]
        for task, _ in dropped:
            del self._tasks[task]
            task.cancel()
        return [line for _, line in dropped]

    def try_no_more(self) -> None:
        """From now on a line that would be tried again later is ended without a result, those that wait now as well."""
        self._last_tries = True
        for task in [*self._pausing]:
            self._give_up(task)

    def _pauses(self, task: _Task, pausing: bool) -> None:
        if not pausing:
            self._pausing.discard(task)
            return
        self._pausing.add(task)
        if self._last_tries:
            self._give_up(task)

    def _give_up(self, task: _Task) -> None:
        if (line := self._tasks.pop(task, None)) is not None:
            task.cancel()
            self._done(line, None)

    async def _compute(self, line: ClaimedLine, content: bytes) -> None:
        task = asyncio.current_task()
        assert task is not None
        for _ in range(_IN_A_ROW):
            result = None
            try:
                result = await self._result(line, content, task)
            except Exception:
                _log.exception("line %d of %s", line.number, line.batch_id)
            finally:
                self._pausing.discard(task)
                # Not there any more: it was dropped.
                if self._tasks.pop(task, None) is not None:
                    self._done(line, result)
            following = self._following()
            if following is None:
                return
            line, content = following
            self._tasks[task] = line
        del self._tasks[task]
        self.start(line, content)

    async def _result(self, line: ClaimedLine, content: bytes, task: _Task) -> LineResult | None:
        try:
            body = _decode(content.removeprefix(b"\xef\xbb\xbf")).body
        except ValueError as error:
            return output_lines.broken(line, "input_broken", f"The line was not found where it was validated: {error}.")
        call = Call(
            line.endpoint,
            bounded_priority(body, line.best_priority),
            output_lines.request_id(line.batch_id, line.number),
            "batch",
            self._timeouts.seconds,
            lambda pausing: self._pauses(task, pausing),
            # One share for all lines of a tenant: between its batches their windows decide, when lines are claimed.
            flow=Flow(line.tenant, "lines"),
        )
        failures = None
        while True:
            try:
                return await self._try(line, call, task)
            except (TimeoutError, DeadlineExceeded) as error:
                return output_lines.broken(line, "request_timeout", str(error))
            except Exception as error:
                if nobody_computes(error):
                    return None
                if not isinstance(error, BatchwrightError):
                    _log.exception("line %d of %s failed", line.number, line.batch_id)
                failures = failures or Failures()
                if not passing(error) or not failures.may_go_on(self._retries, self._clock.now(), self._successes):
                    if hides_details(error):
                        _log.warning("line %d of %s failed: %s", line.number, line.batch_id, error)
                    return output_lines.refused(line, error)
                retry_after = getattr(error, "retry_after", None)
                delay = self._retries.delay(failures.in_a_row, retry_after, self._draw)
            self.tried_again += 1
            self._pauses(task, True)
            await asyncio.sleep(delay)
            self._pauses(task, False)

    async def _try(self, line: ClaimedLine, call: Call, task: _Task) -> LineResult:
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
        return output_lines.succeeded(line, body)
