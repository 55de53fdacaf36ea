"""What the processes of one store tell each other once a second: what was used of quotas, and what they do now."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from batchwright.errors import StoreUnavailable
from batchwright.jobs.store.interface import Store
from batchwright.jobs.store.records import Peer
from batchwright.server.observability.logs import logger
from batchwright.server.quotas import OnlineQuotas

_PERIOD = 1.0
_PATIENCE = 3.0


class Peers:
    """Keeps this process and the other ones informed of each other. No request waits for it."""

    def __init__(
        self, store: Store, quotas: OnlineQuotas, worker: Callable[[], str], snapshot: Callable[[], dict[str, Any]]
    ) -> None:
        """`worker`: the id of this process's worker, empty while it has none. `snapshot`: what the others are told."""
        self.others: list[tuple[Peer, dict[str, Any]]] = []
        """The other processes, with what they last told."""
        self._store = store
        self._quotas = quotas
        self._worker = worker
        self._snapshot = snapshot
        self._published = ""
        self._away = False

    async def run(self) -> None:
        """Exchange until cancelled. While the database is away everything goes on with what is known."""
        while True:
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self.exchange()
                self._away = False
            except (StoreUnavailable, TimeoutError) as error:
                if not self._away:
                    logger.warning("peers: quotas are not shared with other servers for now", error=str(error))
                self._away = True
            except Exception as error:  # such as what another version has written: it must not end the exchange
                logger.error("peers: the exchange with other servers failed", exc_info=error)
            await asyncio.sleep(_PERIOD)

    async def exchange(self) -> None:
        """Once. Raises `StoreUnavailable`."""
        await self._quotas.share()
        worker = self._worker()
        found = await self._store.peers()
        self.others = [(peer, _told(peer.snapshot)) for peer in found if peer.worker != worker]
        inside: Counter[str] = Counter()
        for _, told in self.others:
            inside.update(told.get("inside", {}))
        self._quotas.limiter.learn_inside(inside)
        # One that is alone need not write down what nobody reads.
        if self.others and worker:
            snapshot = json.dumps(self._snapshot() | {"inside": self._quotas.limiter.inside_here})
            if (worker + snapshot) != self._published:
                await self._store.publish(worker, snapshot)
                self._published = worker + snapshot


def _told(snapshot: str | None) -> dict[str, Any]:
    told = {} if snapshot is None else json.loads(snapshot)
    return told if isinstance(told, dict) else {}
