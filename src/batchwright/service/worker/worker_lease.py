"""The lease under which a worker holds lines, batches and messages: registered, renewed, and lost when it runs out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from batchwright.clock import Clock
from batchwright.errors import LeaseLost
from batchwright.service.worker.processes import process_name, this_process
from batchwright.store.store import Store

_log = logging.getLogger(__name__)


class WorkerLease:
    """Lease of one worker, which is registered again, under another id, after a loss."""

    def __init__(self, store: Store, seconds: float, clock: Clock, lost: Callable[[], None]) -> None:
        """`lost` is called when the lease has run out: others may compute what was held."""
        self._store = store
        self._seconds = seconds
        self._clock = clock
        self._lost = lost
        self.id: str | None = None
        """Id of the worker; None while it is not registered."""
        self._former: str | None = None
        """Id that it had until its lease ran out, while it has no other."""
        self._registering = asyncio.Lock()
        self._renew_at = float("-inf")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[str]:
        """Provide the id for one exchange with the store, and note if that shows that the lease is lost."""
        worker = await self._registered()
        try:
            yield worker
        except LeaseLost:
            self._lose(worker)
            raise

    async def keep(self) -> bool:
        """Register, or renew the lease if it is time. Returns False if it had run out."""
        if self._clock.now() < self._renew_at:
            return True
        now, worker = self._clock.now(), await self._registered()
        if not await self._store.renew_lease(worker, self._seconds):
            self._lose(worker)
            return False
        self._renew_at = now + self._seconds / 3
        return True

    async def retire(self) -> None:
        """Give back all that the worker holds, and its id. Raises `StoreUnavailable`."""
        if (worker := self.id) is not None:
            await self._store.retire_worker(worker)
            if worker == self.id:
                self.id = None

    async def _registered(self) -> str:
        async with self._registering:
            if self.id is None:
                self.id = await self._store.register_worker(
                    process_name(), self._seconds, this_process(), former=self._former
                )
                self._former = None
                self._renew_at = self._clock.now() + self._seconds / 3
            return self.id

    def _lose(self, worker: str) -> None:
        if worker == self.id:
            _log.warning("lease %s ran out; what it held is computed again", worker)
            self.id, self._former = None, worker
            self._lost()
