"""Periodic maintenance: expiry of batches, reaping of leases, removal of dead files, lines and messages."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from batchwright.policies.suspects import MAX_CRASHES
from batchwright.service.files.blobs import Blobs
from batchwright.service.files.custody import ESTRANGED, Custody
from batchwright.service.files.sweeper import Sweeper
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.processes import has_ended
from batchwright.store.store import Store

_log = logging.getLogger(__name__)
_FILES_AT_A_TIME = 100
_LOOK_FOR_FILES = 30.0
_ROWS_AT_A_TIME = 5000
"""Number of rows that take the database some tens of milliseconds."""
_LOOK_FOR_ROWS = 30.0
_LOOK_FOR_MESSAGES = 600.0
_MESSAGES_KEPT = 30 * 86_400.0
"""Seconds for which messages to webhooks are kept that were given up."""
_BETWEEN = 0.1
"""Seconds between two removals, during which the database is free for others and other tasks have their turn."""


@dataclass(slots=True)
class _Task:
    perform: Callable[[float], Awaitable[bool]]
    """Function called with the time; returns whether it made work for workers."""
    period: float
    due: float = float("-inf")


class Maintenance:
    """Maintenance of a store by one process. Several processes may do it at once."""

    def __init__(self, store: Store, blobs: Blobs, limits: ServiceLimits, *, max_crashes: int = MAX_CRASHES) -> None:
        """`max_crashes`: number of processes that a line may crash before it fails."""
        self._store = store
        self._max_crashes = max_crashes
        self._blobs = blobs
        self._limits = limits
        self._custody = Custody(store, blobs)
        self._sweeper = Sweeper(store, blobs, self._custody)
        self._estranged = False
        """Whether it was logged that no files are removed."""
        self._verified = False
        """Whether `verify` passed at the start of the current run of removals."""
        self._burial = _Task(self._bury, _LOOK_FOR_FILES)
        self._removal = _Task(self._remove_lines, _LOOK_FOR_ROWS)
        self._forgetting = _Task(self._forget_messages, _LOOK_FOR_MESSAGES)
        self._urgent = [_Task(self._expire, 1.0), _Task(self.reap, 5.0), self._burial]
        self._tasks = [*self._urgent, _Task(self._sweep, 600.0), self._removal, self._forgetting]

    async def perform(self, now: float) -> bool:
        """Perform the tasks that are due at `now` (monotonic seconds). Returns whether there is new work for workers.

        Raises what the store raises, after the other tasks; a task that failed is still due.
        """
        found, failure = False, None
        for task in self._tasks:
            if now >= task.due:
                try:
                    found = await task.perform(now) or found
                except Exception as error:  # the other tasks go on
                    failure = failure or error
                else:
                    task.due = now + task.period
        if failure is not None:
            raise failure
        return found

    def next_due(self) -> float:
        """Return when the next task is due."""
        return min(task.due for task in self._tasks)

    def close(self) -> None:
        """Let another process take over the tasks that one process does for all."""
        self._sweeper.close()

    def hasten(self) -> None:
        """Make the tasks for expired batches, dead workers and dead files due at once."""
        for task in self._urgent:
            task.due = float("-inf")

    async def _expire(self, now: float) -> bool:
        return bool(await self._store.expire_batches())

    async def reap(self, now: float | None = None) -> bool:
        """Take lines from dead workers. Returns whether there were any."""
        lines = await self._store.reap(max_crashes=self._max_crashes)
        if lines:
            _log.warning(
                "took %d lines from workers that did not renew their lease, which may have died of them", lines
            )
        left = 0
        for worker, process in (await self._store.processes()).items():
            if has_ended(process):
                left += await self._store.worker_died(worker, max_crashes=self._max_crashes)
        if left:
            _log.warning("took %d lines from workers on this machine whose process died, perhaps of them", left)
        return lines + left > 0

    async def _bury(self, now: float) -> bool:
        verified, self._verified = self._verified, False
        self._burial.period = _LOOK_FOR_FILES
        dead = await self._store.take_dead_files(_FILES_AT_A_TIME)
        if not dead or not await self._custody.is_current():
            return False
        if not verified:
            # Once for all that are dead now, since it takes time in proportion to the number of files.
            await self._store.verify()
        await self._blobs.remove(dead)
        await self._store.forget_files(dead)
        # Not all at once, since no batch would expire meanwhile.
        if len(dead) == _FILES_AT_A_TIME:
            self._verified, self._burial.period = True, _BETWEEN
        return False

    async def _remove_lines(self, now: float) -> bool:
        # Not all at once, since no batch would expire meanwhile.
        more = await self._store.remove_lines(_ROWS_AT_A_TIME, age=self._limits.file_age)
        self._removal.period = _BETWEEN if more else _LOOK_FOR_ROWS
        return False

    async def _forget_messages(self, now: float) -> bool:
        more = await self._store.forget_deliveries(_ROWS_AT_A_TIME, age=_MESSAGES_KEPT)
        self._forgetting.period = _BETWEEN if more else _LOOK_FOR_MESSAGES
        return False

    async def _sweep(self, now: float) -> bool:
        swept = await self._sweeper.sweep(now)
        if swept.estranged and not self._estranged:
            _log.warning(ESTRANGED, self._blobs.folder)
        self._estranged = swept.estranged
        for count, what in (
            (swept.temporary, "removed %d temporary files that a crash had left behind"),
            (swept.quarantined, "put %d files that no record names into quarantine"),
            (swept.restored, "took %d files out of quarantine: they have records"),
            (swept.removed, "removed %d files from quarantine: no record named them for as long as one might"),
        ):
            if count:
                _log.warning(what, count)
        return False
