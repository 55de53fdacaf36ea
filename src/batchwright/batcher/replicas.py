"""Several copies of a model behind one queue.

There is one queue for all, and a replica gets its next batch when it has none. That is "least loaded first" in its
strict form: no replica has less outstanding than nothing, and no request waits at a slow replica while another is free.
Of several free replicas, the one that was given the fewest prompts is used: given, not computed, otherwise one that
fails immediately would always be first.

A replica that fails is taken out at once, and its batch goes to another. Returning something other than one output per
prompt, or only errors, also counts as a failure. If the other succeeds, the first one stays out for a second, then for
twice as long each time it fails again. If the batch fails there too, the batch is to blame, and the replica comes back.

If a replica fails some items, they are tried on another one. Those that succeed there count against the first, which is
taken out once they are more than a quarter of its recent items. So a replica that quickly answers with an exception for
nearly every item does not attract the traffic.

A replica that hangs does not fail. It is taken out if a batch in it is cancelled because all its deadlines have passed,
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
from batchwright.errors import DeadlineExceeded
from batchwright.out_of_memory import ran_out_of_memory
from batchwright.request import InferenceRequest, InferenceResponse

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_HANGS = 2.0
"""Multiple of the longest batch elsewhere: a batch that took longer, and was late, hung."""
_ITEMS_REMEMBERED = 64
"""Number of recent items by which a replica is judged."""
_FEW_BAD = 3
_BAD_SHARE = 0.25
"""Share of its items, from `_FEW_BAD` on, that a replica may fail although another can compute them."""
_ROUNDING = 1e-6
"""Seconds by which a timer may ring early."""


@dataclass(slots=True, eq=False)
class Replica:
    """One copy of the model, and its state."""

    runner: Runner
    busy: bool = False
    batches: int = 0
    """Batches computed."""
    items: int = 0
    """Prompts computed."""
    given: int = 0
    """Prompts given to it, computed or not."""
    longest: float = 0.0
    """Seconds of its longest batch."""
    failures: int = 0
    """Batches that failed here and not elsewhere, or hung here until all their deadlines had passed."""
    good: float = 0.0
    """Prompts that it computed recently."""
    bad: float = 0.0
    """Prompts that recently failed here, and not in another replica."""
    pause: float = 0.0
    """Seconds for which it was last taken out; 0 since it last computed a batch."""
    returns: float = -math.inf
    """When it is tried again, on the clock of the batcher."""


class Replicas(Runner):
    """Runner of each batch on one of several models. Raises ValueError if there is none."""

    def __init__(self, models: Sequence[Model], clock: Clock) -> None:
        if not models:
            raise ValueError("models: give at least one")
        self.replicas = [Replica(Runner(model, slots=1)) for model in models]
        self.tokenizer = self.replicas[0].runner.tokenizer
        self.in_thread = any(replica.runner.in_thread for replica in self.replicas)
        self.takes_requests = any(replica.runner.takes_requests for replica in self.replicas)
        self._clock = clock
        self._freed: set[asyncio.Future[None]] = set()

    @property
    def slots(self) -> int:
        return sum(map(self._is_in, self.replicas))

    def changes_at(self, now: float) -> float:
        return min((replica.returns for replica in self.replicas if not self._is_in(replica)), default=math.inf)

    async def run(self, prompts: list[Any], requests: list[InferenceRequest | None]) -> list[Any]:
        outputs, replica = await self._run_whole(prompts, requests)
        failed = [number for number, output in enumerate(outputs) if _may_succeed_elsewhere(output)]
        if not failed:
            self._count_items(replica, len(outputs), 0)
        elif len(failed) < len(outputs):
            some = await self._run_elsewhere(
                replica, [prompts[number] for number in failed], [requests[number] for number in failed]
            )
            redeemed = 0
            for number, output in zip(failed, some, strict=False):
                if not is_failure(output):
                    outputs[number] = output
                    redeemed += 1
            self._count_items(replica, len(outputs) - len(failed), redeemed)
        return outputs

    async def _run_whole(
        self, prompts: list[Any], requests: list[InferenceRequest | None]
    ) -> tuple[list[Any], Replica]:
        """Return the outputs of the first replica that computes any of a batch, or of the second, and the replica."""
        suspect: Replica | None = None
        while True:
            replica = await self._take(len(prompts))
            assert replica is not None  # any will do
            begin = self._clock.now()
            try:
                outputs = await replica.runner.run(prompts, requests)
                if all(map(_is_late, outputs)):
                    return outputs, replica
                if not all(map(is_failure, outputs)):
                    self._succeeded(replica, suspect, len(prompts), self._clock.now() - begin)
                    return outputs, replica
                if not self._compares(replica, suspect):
                    return outputs, replica
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

    async def _run_elsewhere(
        self, replica: Replica, prompts: list[Any], requests: list[InferenceRequest | None]
    ) -> list[Any]:
        """Return the outputs of a replica other than `replica` for these items; none if it has none."""
        other = await self._take(len(prompts), instead_of=replica)
        if other is None:
            return []
        try:
            outputs = await other.runner.run(prompts, requests)
            self._count_items(other, sum(not is_failure(output) for output in outputs), 0)
            return outputs
        except (Exception, asyncio.CancelledError):
            if is_being_cancelled():
                raise
            # The items are to blame: they failed in both.
            return []
        finally:
            self._free(other)

    def _count_items(self, replica: Replica, good: int, bad: int) -> None:
        """Count items that a replica computed, and items that it failed and another computed."""
        replica.good += good
        replica.bad += bad
        if (known := replica.good + replica.bad) > _ITEMS_REMEMBERED:
            replica.good *= _ITEMS_REMEMBERED / known
            replica.bad *= _ITEMS_REMEMBERED / known
        if replica.bad >= _FEW_BAD and replica.bad > _BAD_SHARE * (replica.good + replica.bad):
            replica.good = replica.bad = 0.0
            if self._is_in(replica) and self._take_out(replica):
                replica.failures += 1

    async def release(self) -> None:
        for replica in self.replicas:
            await replica.runner.release()

    async def _take(self, size: int, instead_of: Replica | None = None) -> Replica | None:
        """Wait for a free replica, and take it; None if there is none other than `instead_of` now."""
        loop = asyncio.get_running_loop()
        while True:
            there = [replica for replica in self.replicas if self._is_in(replica) and replica is not instead_of]
            if not there and instead_of is not None:
                return None
            free = [replica for replica in there if not replica.busy]
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
        """Record a batch that failed in `replica`, and before that in `suspect`; return whether to try another."""
        if suspect is not None and suspect is not replica:
            self._take_back(suspect)
            return False
        return self._take_out(replica)

    def _was_late(self, replica: Replica, seconds: float) -> None:
        others = [other.longest for other in self.replicas if other is not replica and other.batches]
        if others and seconds > _HANGS * max(others) and self._take_out(replica):
            replica.failures += 1

    def _take_out(self, replica: Replica) -> bool:
        """Take a replica out for a while. False if it is the last one."""
        if not any(self._is_in(other) for other in self.replicas if other is not replica):
            return False
        replica.pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * replica.pause))
        replica.returns = self._clock.now() + replica.pause
        return True

    def _take_back(self, replica: Replica) -> None:
        replica.pause = replica.pause / 2 if replica.pause > _FIRST_PAUSE else 0.0
        replica.returns = -math.inf


def _may_succeed_elsewhere(output: object) -> bool:
    # A batch that needs too much memory is computed again in smaller parts.
    return is_failure(output) and not _is_late(output) and not ran_out_of_memory(output)


def _is_late(output: object) -> bool:
    """Return whether the deadline of a request has passed: what is late is late everywhere."""
    return isinstance(output.error if isinstance(output, InferenceResponse) else output, DeadlineExceeded)


def _release(freed: asyncio.Future[None]) -> None:
    if not freed.done():
        freed.set_result(None)
