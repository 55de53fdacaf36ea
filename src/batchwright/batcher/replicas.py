"""Several copies of a model behind one queue.

The idea: there is one queue for all, and a replica gets its next batch when it has none. That is "least loaded first"
in its strict form: nobody has less outstanding than nothing, and no request waits at a slow replica while another is
free. Of several free ones the one that has computed least goes first.

A replica that fails is taken out at once, and its batch goes to another. If that succeeds, the first one stays out, for
a second, then for twice as long each time it fails again. If it fails there too, the batch is to blame, and the replica
comes back. The last replica is never taken out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.batcher.model import Model, Runner, WrongOutputs, is_being_cancelled
from batchwright.clock import Clock
from batchwright.request import InferenceRequest

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_ROUNDING = 1e-6
"""Seconds by which a timer may ring early."""


@dataclass(slots=True, eq=False)
class Replica:
    """One copy of the model, and how it fares."""

    runner: Runner
    busy: bool = False
    batches: int = 0
    """Computed."""
    items: int = 0
    """Prompts computed."""
    failures: int = 0
    """Batches that failed here and not elsewhere."""
    pause: float = 0.0
    """How long it was last taken out, in seconds; 0 since it last computed a batch."""
    returns: float = -math.inf
    """When it is tried again, on the clock of the batcher."""


class Replicas(Runner):
    """Runs each batch on one of several models. Raises ValueError when there is none."""

    def __init__(self, models: Sequence[Model], clock: Clock) -> None:
        if not models:
            raise ValueError("models: give at least one")
        self.replicas = [Replica(Runner(model, slots=1)) for model in models]
        self.tokenizer = getattr(models[0], "tokenizer", None)
        self.in_thread = any(replica.runner.in_thread for replica in self.replicas)
        self._clock = clock
        self._freed: set[asyncio.Future[None]] = set()

    @property
    def slots(self) -> int:
        return sum(map(self._is_in, self.replicas))

    def changes_at(self, now: float) -> float:
        return min((replica.returns for replica in self.replicas if not self._is_in(replica)), default=math.inf)

    async def run(self, prompts: list[Any], requests: list[InferenceRequest | None]) -> list[Any]:
        suspect: Replica | None = None
        while True:
            replica = await self._take()
            try:
                outputs = await replica.runner.run(prompts, requests)
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, WrongOutputs) or is_being_cancelled():
                    raise
                if suspect is not None and suspect is not replica:
                    self._take_back(suspect)
                    raise
                if not self._take_out(replica):
                    raise
                suspect = replica
            else:
                replica.batches += 1
                replica.items += len(prompts)
                replica.pause = 0.0
                if suspect is not None and suspect is not replica:
                    suspect.failures += 1
                return outputs
            finally:
                self._free(replica)

    def close(self) -> None:
        for replica in self.replicas:
            replica.runner.close()

    async def _take(self) -> Replica:
        loop = asyncio.get_running_loop()
        while True:
            free = [replica for replica in self.replicas if not replica.busy and self._is_in(replica)]
            if free:
                replica = min(free, key=lambda each: each.items)
                replica.busy = True
                return replica
            freed = loop.create_future()
            self._freed.add(freed)
            now = self._clock.now()
            returns = self.changes_at(now)
            timer = loop.call_later(returns - now, _release, freed) if returns < math.inf else None
            try:
                await freed
            finally:
                self._freed.discard(freed)
                if timer is not None:
                    timer.cancel()

    def _is_in(self, replica: Replica) -> bool:
        return replica.returns - self._clock.now() <= _ROUNDING

    def _free(self, replica: Replica) -> None:
        replica.busy = False
        for freed in self._freed:
            _release(freed)

    def _take_out(self, replica: Replica) -> bool:
        """False when it is the last one."""
        if not any(self._is_in(other) for other in self.replicas if other is not replica):
            return False
        replica.pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * replica.pause))
        replica.returns = self._clock.now() + replica.pause
        return True

    def _take_back(self, replica: Replica) -> None:
        replica.pause = replica.pause / 2 if replica.pause > _FIRST_PAUSE else 0.0
        replica.returns = -math.inf


def _release(freed: asyncio.Future[None]) -> None:
    if not freed.done():
        freed.set_result(None)
