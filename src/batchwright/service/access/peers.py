"""Exchange between the processes of one store: use of quotas, current figures, and forecasts of batches.

It takes place once a second, and for each request with a quota while there are other processes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchwright.errors import StoreUnavailable
from batchwright.service.access.online_quotas import OnlineQuotas
from batchwright.service.observability.logs import logger
from batchwright.store.records import Peer
from batchwright.store.store import Store

_PERIOD = 1.0
_PATIENCE = 3.0
_PATIENCE_OF_REQUESTS = 0.5
"""Seconds for which a request waits for the store before it is decided by what is known here."""


class Peers:
    """Other processes of the store, and the exchange with them."""

    def __init__(
        self,
        store: Store,
        quotas: OnlineQuotas,
        worker: Callable[[], str],
        snapshot: Callable[[], dict[str, Any]],
        learn_limits: Callable[[Sequence[Mapping[str, Any]]], None] = lambda others: None,
    ) -> None:
        """`worker` returns the id of this process's worker, empty if it has none; `snapshot` what is published.

        `learn_limits` is called with what each other process published as `limits`: what it uses, wants and has found
        out about limits that apply to all of them together.
        """
        self.others: list[tuple[Peer, dict[str, Any]]] = []
        """Other processes, with what they last published."""
        self._store = store
        self._quotas = quotas
        self._worker = worker
        self._snapshot = snapshot
        self._learn_limits = learn_limits
        self._published = ""
        self._away = False
        self._current: asyncio.Task[None] | None = None
        """Exchange that began last."""
        self._next: asyncio.Task[None] | None = None
        """Exchange that begins when `_current` is over."""

    async def run(self) -> None:
        """Exchange until cancelled. While the database is away, what is known remains in use."""
        try:
            while True:
                await asyncio.shield(self._joined())
                await asyncio.sleep(_PERIOD)
        finally:
            under_way = [each for each in (self._current, self._next) if each is not None]
            for each in under_way:
                each.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def agree(self) -> None:
        """Wait for an exchange that begins after this call, if there are other processes.

        Returns at once while the database is away, and after half a second when it does not answer.
        """
        if self.others and not self._away:
            await asyncio.wait([self._joined()], timeout=_PATIENCE_OF_REQUESTS)

    def notify(self) -> None:
        """Begin an exchange soon, if there are other processes."""
        if self.others and not self._away:
            self._joined()

    def _joined(self) -> asyncio.Task[None]:
        """Return the exchange that begins next, which all callers until then share."""
        if self._next is None:
            self._next = asyncio.create_task(self._begin(self._current), name="exchange with peers")
        return self._next

    async def _begin(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        self._current, self._next = self._next, None
        try:
            async with asyncio.timeout(_PATIENCE):
                await self.exchange()
            self._away = False
        except (StoreUnavailable, TimeoutError) as error:
            if not self._away:
                logger.warning("peers: quotas are not shared with other servers for now", error=str(error))
            self._away = True
        except Exception as error:  # such as data written by another version, which must not end the exchange
            logger.error("peers: the exchange with other servers failed", exc_info=error)

    async def exchange(self) -> None:
        """Exchange once. Raises `StoreUnavailable`."""
        await self._quotas.share()
        worker = self._worker()
        found = await (self._publish(worker) if self._published and worker else self._store.peers())
        # A process that is alone and has no forecasts publishes nothing, and withdraws what it has published before.
        alone = all(peer.worker == worker for peer in found) and not self._snapshot().get("forecasts")
        if not self._published and worker and not alone:
            found = await self._publish(worker)
        elif self._published and alone:
            found = await self._store.publish(worker, "{}")
            self._published = ""
        self.others = [(peer, read_snapshot(peer)) for peer in found if peer.worker != worker]
        inside: Counter[str] = Counter()
        for _, snapshot in self.others:
            inside.update(snapshot.get("inside", {}))
        self._quotas.limiter.learn_inside(inside)
        self._learn_limits([_use_of_limits(snapshot) for _, snapshot in self.others])

    async def _publish(self, worker: str) -> list[Peer]:
        """Publish the snapshot of this process, and return all processes."""
        snapshot = json.dumps(self._snapshot() | {"inside": self._quotas.limiter.inside_here})
        if worker + snapshot == self._published:
            return await self._store.peers()
        found = await self._store.publish(worker, snapshot)
        self._published = worker + snapshot
        return found


def read_snapshot(peer: Peer) -> dict[str, Any]:
    """Return what a process last published; nothing where another version published something else."""
    snapshot = {} if peer.snapshot is None else json.loads(peer.snapshot)
    return snapshot if isinstance(snapshot, dict) else {}


def _use_of_limits(snapshot: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers that a snapshot has under `limits`, by limit and name, without invalid values."""
    limits = snapshot.get("limits")
    used = {name: each for name, each in limits.items() if isinstance(each, dict)} if isinstance(limits, dict) else {}
    return {
        name: {kind: amount for kind, amount in each.items() if type(amount) in (int, float) and 0 < amount < math.inf}
        for name, each in used.items()
    }
