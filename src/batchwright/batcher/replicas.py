"""Several copies of a model behind one queue.

The idea: there is one queue for all, and a replica gets its next batch when it has none. That is "least loaded first"
in its strict form: nobody has less outstanding than nothing, and no request waits at a slow replica while another is
free. Of several free ones the one that was given least goes first: given, not computed, lest one that fails at once
always be the first.

A replica that fails is taken out at once, and its batch goes to another. To return something else than one output for
each prompt, or nothing but errors, is to fail too. If the other succeeds, the first one stays out, for a second, then
for twice as long each time it fails again. If it fails there too, the batch is to blame, and the replica comes back.

One that hangs fails nothing. It is taken out when a batch in it was cancelled because all its deadlines had passed,
after more than twice the time that any batch took elsewhere: requests may also be late because they waited long.

The last replica is never taken out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchwright.batcher.model import DEADLINES_PASSED, Model, Runner, is_being_cancelled, is_failure
from batchwright.clock import Clock
from batchwright.request import InferenceRequest

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_HANGS = 2.0
"""Times the longest batch elsewhere: a batch that took longer, and was late, hung."""
_ROUNDING = 1e-6
"""Seconds by which a timer may ring early."""


@dataclass(slots=True, eq=False)
class Replica:
    """One copy of the model, and how it fares."""

    runner: Runner
    busy: bool = False
    batches: int = 0
    """Batches computed."""
    items: int = 0
    """Prompts computed."""
    given: int = 0
    """Prompts that it was given, computed or not."""
    longest: float = 0.0
    """Seconds of its longest batch."""
    failures: int = 0
    """Batches that failed here and not elsewhere, or hung here until all their deadlines had passed."""
    pause: float = 0.0
    """Seconds that it was last taken out for; 0 since it last computed a batch."""
    returns: float = -math.inf
    """When it is tried again, on the clock of the batcher."""


class Replicas(Runner):
    """Runner of each batch on one of several models. Raises ValueError when there is none."""

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
            replica = await self._take(len(prompts))
            begin = self._clock.now()
            try:
                outputs = await replica.runner.run(prompts, requests)
                if not all(map(is_failure, outputs)):
                    self._succeeded(replica, suspect, len(prompts), self._clock.now() - begin)
                    return outputs
                if not self._compares(replica, suspect):
                    return outputs
            except (Exception, asyncio.CancelledError) as error:
                if is_being_cancelled():
                    if error.args == (DEADLINES_PASSED,):
                        self._was_late(replica, self._clock.now() - begin)
                    raise
                if not self._compares(replica, suspect):
                    raise
            finally:
                self._free(replica)
            suspect = replica

    def close(self) -> None:
        for replica in self.replicas:
            replica.runner.close()

    async def _take(self, size: int) -> Replica:
        loop = asyncio.get_running_loop()
        while True:
            free = [replica for replica in self.replicas if not replica.busy and self._is_in(replica)]
            if free:
                replica = min(free, key=lambda each: each.given)
                replica.busy = True
                replica.given += size
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

    def _succeeded(self, replica: Replica, suspect: Replica | None, size: int, seconds: float) -> None:
        replica.batches += 1
        replica.items += size
        replica.pause = 0.0
        replica.longest = max(replica.longest, seconds)
        if suspect is not None and suspect is not replica:
            suspect.failures += 1

    def _compares(self, replica: Replica, suspect: Replica | None) -> bool:
        """Note a batch that failed in `replica` and before in `suspect`; return whether to try another."""
        if suspect is not None and suspect is not replica:
            self._take_back(suspect)
            return False
        return self._take_out(replica)

    def _was_late(self, replica: Replica, seconds: float) -> None:
        others = [other.longest for other in self.replicas if other is not replica and other.batches]
        if others and seconds > _HANGS * max(others) and self._take_out(replica):
            replica.failures += 1

    def _take_out(self, replica: Replica) -> bool:
        """Take a replica out for a while. False when it is the last one."""
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
