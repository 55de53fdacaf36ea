"""A worker: takes batches and lines from the store, has them computed, and commits the results.

It runs on the event loop of its process, with the server or alone, as a few loops that share only the store and the
claimed lines:

- *feed* claims lines so that the model has what it wants and some are ready (`ClaimPlan`), and starts them;
- *commit* commits all results that were gathered during the previous commit;
- *validate* and *finish* begin and end batches;
- *lease* renews the lease, and drops the lines of batches that have been ended;
- *forecast* foresees the ends of the batches that it computes;
- *maintenance* performs periodic tasks (`maintenance.py`).

While the store is unavailable, operations are retried and results wait. When the lease is lost, all claimed lines are
forgotten, since other workers may compute them, and the worker registers again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Self

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import EngineClosed, LeaseLost, StoreUnavailable
from batchwright.inference.inference import Inference, engine_stats_of, work_of
from batchwright.lines.batch_line import request_prefix
from batchwright.lines.line_executor import LineExecutor, Outcome
from batchwright.lines.line_retries import RetryPolicy
from batchwright.policies.suspects import MAX_CRASHES
from batchwright.service.batches.batch_progress import BatchRates
from batchwright.service.files.blobs import Blobs
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker import output_lines
from batchwright.service.worker.claimed_lines import ClaimedLines, ClaimPlan, call_of, read_contents
from batchwright.service.worker.copies import Copies, Copy, Item
from batchwright.service.worker.finisher import finish
from batchwright.service.worker.maintenance import Maintenance
from batchwright.service.worker.periodic import PeriodicTask
from batchwright.service.worker.validation import validate
from batchwright.service.worker.worker_lease import WorkerLease
from batchwright.store.records import BatchProblem, ClaimedLine, LineResult
from batchwright.store.store import Store
from batchwright.wire.error_bodies import hides_details

_log = logging.getLogger(__name__)

_CLAIM_LINES = 4096
_READY_BYTES = 32 * 2**20
"""Most bytes of waiting lines, approximately."""
_SHORT_POLL = 0.05
"""Seconds between checks whether the model wants more, while lines wait."""
_FORESEEN = 16
"""Most batches whose end is foreseen: those with the most lines being computed."""
_REST = 1.0
"""Seconds without claims after the inference has said that it cannot compute."""
_USUAL_PLACES = 64
"""Lines assumed to be computed at once if the inference does not say how many it has places for."""
_LAST_COMMITS = 5.0
"""Least seconds that a stopping worker has for committing its results."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of a worker. Times in seconds."""

    concurrency: int | None = None
    """Most lines being computed at once; None: as many as the model wants."""
    lease: float = 15.0
    """Seconds after which lines of a worker that does not renew its lease go to others."""
    poll: float = 1.0
    """Seconds between checks of the store for changes by other processes."""
    request_timeout: float | None = 3600.0
    """Most seconds for one try to compute a line; None: no limit."""
    asks_once: bool = False
    """Whether lines of a batch with the same request, and the same answer each time, are computed once."""
    computes_here: bool = False
    """Whether models of batchwright's own engine compute them, of which more is known than of an endpoint elsewhere."""
    max_crashes: int = MAX_CRASHES
    """Number of processes that a line may crash before it fails."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    limits: ServiceLimits = field(default_factory=ServiceLimits)


@dataclass(slots=True)
class WorkerStats:
    """Counters of a worker since it was made."""

    succeeded: int = 0
    failed: int = 0
    """Number of lines whose error was committed."""
    refused: int = 0
    """Number of results that the store refused, since the batch had ended or another worker has the line."""
    crashed: int = 0
    """Number of lines given up because the process died each time that they were computed."""
    commits: int = 0
    leases_lost: int = 0


class Worker:
    """Worker that is active from `start` to `stop`. All methods are called on one event loop."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        inference: Inference,
        *,
        options: WorkerOptions | None = None,
        rates: BatchRates | None = None,
        clock: Clock | None = None,
        unix_time: Callable[[], float] = time.time,
        draw: random.Random | None = None,
    ) -> None:
        """`rates` is notified of committed lines; `draw` gives the random part of the delays between tries."""
        self._store = store
        self._blobs = blobs
        self._inference = inference
        self._options = options or WorkerOptions()
        self._clock = clock or MonotonicClock()
        self._unix_time = unix_time
        self.stats = WorkerStats()
        self._rates = rates or BatchRates()
        self._maintenance = Maintenance(store, blobs, self._options.limits, max_crashes=self._options.max_crashes)
        self._plan = ClaimPlan(self._clock.now())
        self._executor = LineExecutor[Item](
            inference,
            call_of=partial(call_of, timeout=self._options.request_timeout),
            done=self._line_ended,
            following=self._following,
            timeout=self._options.request_timeout,
            retries=self._options.retries,
            clock=self._clock,
            draw=draw or random.Random(),
        )
        self._copies = Copies(
            store, blobs, longest_line=self._options.limits.max_line_bytes, here=self._options.computes_here
        )
        self._claimed = ClaimedLines(self._executor, self._copies)
        self._lease = WorkerLease(store, self._options.lease, self._clock, self._lease_lost)
        self._look_at = self._claim_at = self._rest_until = float("-inf")
        """Earliest times to look for ended batches, to claim, and to claim if there may be more."""
        self._claims_begun = 0
        self._empty_claim = 0
        """Number of the last claim if it was made while nothing was held and found nothing; otherwise 0."""
        self._settled_since: int | None = None
        """Value of `_claims_begun` since which no line in the store is being computed; None if some line is."""
        self._in_doubt = False
        """Whether a claim that failed may have taken effect: the worker may hold lines that it does not know of."""
        self._reaped = False
        self._suspects = False
        """Whether it computes lines that may have crashed a process, few of which are claimed at once."""
        self._line_bytes = 65_536.0
        """Average size of a line in bytes; a guess until the first claim."""
        self._moved = asyncio.Event()
        """Event set when a line ended, was committed or was given back."""
        self._loops: dict[str, PeriodicTask] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # For its owner.

    async def start(self) -> None:
        """Start the loops."""
        poll = self._options.poll
        steps: dict[str, tuple[Callable[[], Awaitable[bool]], Callable[[], float | None]]] = {
            "lease": (self._keep_lease, lambda: min(poll, self._options.lease / 3)),
            "commit": (self._commit, lambda: None),
            "feed": (self._feed, lambda: _SHORT_POLL if self._claimed.waiting else poll),
            "validate": (self._validate, lambda: poll),
            "finish": (self._finish, lambda: poll),
            "forecast": (self._foresee, lambda: poll),
            "maintenance": (self._maintain, lambda: max(0.0, self._maintenance.next_due() - self._clock.now())),
        }
        for name, (step, pause) in steps.items():
            self._loops[name] = loop = PeriodicTask(name, step, pause)
            self._tasks[name] = asyncio.create_task(loop.run())

    def wake(self) -> None:
        """Look at once for new work and for batches that were ended, because this process made a change."""
        self._look_at = self._claim_at = float("-inf")
        self._settled_since = None
        self._maintenance.hasten()
        for loop in self._loops.values():
            loop.wake()

    @property
    def id(self) -> str:
        """Id under which it holds its lease now, for what works on its behalf; empty while it has none."""
        return self._lease.id or ""

    @property
    def in_flight(self) -> int:
        """Number of lines being computed."""
        return len(self._executor)

    async def until_idle(self) -> None:
        """Wait until no worker has anything left to do. Paused batches do not count."""
        while True:
            with suppress(StoreUnavailable):  # then it is not known what is left
                if await self._idle():
                    return
            await asyncio.sleep(self._options.poll)

    async def stop(self, grace: float = 30.0) -> None:
        """Give back lines that were not begun or would be tried again, finish running ones, and commit the results.

        Lines that have not ended after `grace` seconds are given back too. Does nothing unless started.
        """
        if not self._tasks:
            return
        await self._end("feed", "validate", "finish", "forecast", "maintenance")
        self._maintenance.close()
        self._claimed.give_back_waiting()
        self._executor.try_no_more()
        self._loops["commit"].wake()
        await self._until(lambda: not self.in_flight, grace)
        self._claimed.give_back_running()
        self._loops["commit"].wake()
        await self._until(lambda: self._claimed.empty, max(_LAST_COMMITS, grace))
        await self._end("commit", "lease")
        # If that fails, what it holds is taken from it when its lease runs out.
        with suppress(StoreUnavailable):
            await self._lease.retire()
        self._lease.id = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    # Steps of the loops.

    async def _keep_lease(self) -> bool:
        if not await self._lease.keep():
            return True
        now = self._clock.now()
        if now >= self._look_at and self._claimed.batches:
            self._look_at = now + self._options.poll
            ended = await self._store.ending_among([*self._claimed.batches])
            if ended:
                if self._claimed.drop(ended):
                    self._loops["feed"].wake()
                    self._loops["commit"].wake()
                self._loops["finish"].wake()
        return False

    async def _feed(self) -> bool:
        self._fill()
        now = self._clock.now()
        if self._claimed.congested or self._claimed.waiting_bytes >= _READY_BYTES or now < self._claim_at:
            return False
        if self._in_doubt and not await self._settled():
            return False
        wanted = self._plan.wanted(now, room=self._room, waiting=len(self._claimed.waiting))
        if excess := self._plan.excess(now, waiting=len(self._claimed.waiting)):
            self._claimed.give_back_last(excess)
            self._loops["commit"].wake()
        if not wanted:
            return False
        limit = min(wanted, _CLAIM_LINES, max(1, int(_READY_BYTES / self._line_bytes)))
        if not self._reaped:
            # Lines left by an earlier process must be known while nothing is held: only then are suspects claimed.
            await self._maintenance.reap()
            self._reaped = True
        held_nothing = self._claimed.empty
        async with self._lease.held() as worker:
            self._claims_begun += 1
            claim = self._claims_begun
            try:
                lines = await self._store.claim(worker, limit)
            except StoreUnavailable:
                self._in_doubt = True
                raise
            # A worker that holds lines may get none, so that it can take suspects afterwards.
            self._empty_claim = claim if held_nothing and not lines else 0
            lines = self._without_given_up(worker, lines)
            try:
                items, answered = await self._read(lines)
            except BaseException:
                if worker == self._lease.id:
                    self._claimed.give_back(lines)
                    self._loops["commit"].wake()
                raise
        if lines:
            self._line_bytes = max(1.0, sum(line.length for line in lines) / len(lines))
            self._suspects = lines[0].crashes > 0
        if len(lines) < limit:
            self._claim_at = now + self._options.poll
        if worker == self._lease.id:
            self._claimed.answer_at_once(answered)
            self._claimed.take(items)
            self._loops["commit"].wake()
            self._fill()
        return bool(lines)

    async def _read(self, lines: list[ClaimedLine]) -> tuple[list[Item], list[Copy]]:
        """Return the lines to compute, and those whose answer is that of an identical one, with its output."""
        items = await read_contents(self._blobs, lines)
        if not self._options.asks_once:
            return items, []
        outputs = await self._copies.answered_before(items)
        left = [item for item, output in zip(items, outputs, strict=True) if output is None]
        return left, [(line, output) for (line, _), output in zip(items, outputs, strict=True) if output is not None]

    def _without_given_up(self, worker: str, lines: list[ClaimedLine]) -> list[ClaimedLine]:
        """Return the lines to compute, and fail those that were given up."""
        given_up = [line for line in lines if line.given_up]
        if not given_up:
            return lines
        for line in given_up:
            _log.error("line %d of %s fails: a process died of it %d times", line.number, line.batch_id, line.crashes)
        if worker == self._lease.id:
            self.stats.crashed += len(given_up)
            self._claimed.end_at_once(output_lines.crashed(line) for line in given_up)
            self._loops["commit"].wake()
        return [line for line in lines if not line.given_up]

    async def _settled(self) -> bool:
        """Give back lines held unknowingly, if no others are held. Returns whether none are held afterwards."""
        if not self._claimed.empty:
            return False
        await self._lease.retire()
        self._in_doubt = False
        return True

    async def _commit(self) -> bool:
        if self._lease.id is None:
            return False
        returned = self._claimed.returned()
        if returned:
            async with self._lease.held() as worker:
                await self._store.release(worker, returned)
                if worker == self._lease.id:
                    self._claimed.release_returned(returned)
                    self._moved.set()
        results = self._claimed.gather_results()
        if results:
            await self._commit_results(results)
        return bool(results)

    async def _commit_results(self, results: list[LineResult]) -> None:
        async with self._lease.held() as worker:
            try:
                taken = await self._store.commit(worker, results)
            except LeaseLost:
                raise
            except BaseException:
                if worker == self._lease.id:
                    self._claimed.put_back(results)
                raise
            self._count(results, taken)
            if worker == self._lease.id:
                self._copies.committed(results)
                self._moved.set()
                if self._claimed.release(results):
                    self._loops["finish"].wake()
                if self._suspects or self._claimed.empty:
                    # A worker that holds less may get more.
                    self._claim_at = min(self._claim_at, self._rest_until)
                    self._loops["feed"].wake()
                self._fill()
                self._wake_feed_when_low()

    async def _validate(self) -> bool:
        async with self._lease.held() as worker:
            batch = await self._store.take_validation(worker)
            if batch is None:
                return False
            try:
                await validate(self._store, self._blobs, worker, batch, self._options.limits, places=self._places)
            except (LeaseLost, StoreUnavailable, OSError):
                raise  # an OSError is that of all files, since one file's own is `InputBroken`
            except Exception as error:
                # It must not block the batches behind it.
                _log.exception("%s cannot be validated", batch.id)
                reason = type(error.__cause__ or error).__name__
                problem = BatchProblem("internal_error", f"The input file cannot be read: {reason}.")
                await self._store.reject(worker, batch.id, [problem])
        self._claim_at = float("-inf")
        self._settled_since = None
        self._loops["feed"].wake()
        return True

    async def _finish(self) -> bool:
        async with self._lease.held() as worker:
            batch = await self._store.take_finishing(worker)
            if batch is None:
                return False
            await finish(self._store, self._blobs, worker, batch, self._options.limits, self._unix_time)
            self._rates.forecasts.forget(batch.id)
        return True

    async def _foresee(self) -> bool:
        running: defaultdict[tuple[str, str], list[ClaimedLine]] = defaultdict(list)
        for line, _ in self._executor.lines:
            running[line.tenant, line.batch_id].append(line)
        largest = sorted(running, key=lambda batch: len(running[batch]), reverse=True)
        for tenant, batch_id in largest[:_FORESEEN]:
            batch = await self._store.batch(tenant, batch_id)
            if batch is None or batch.ending is not None:
                self._rates.forecasts.forget(batch_id)
                continue
            with suppress(EngineClosed):
                work = await work_of(self._inference, request_prefix(output_lines.key_of(batch_id)))
                lines = [line for line, _ in self._executor.lines if line.batch_id == batch_id]
                self._rates.forecasts.observe(batch, lines, work, self._clock.now())
        return False

    async def _maintain(self) -> bool:
        if await self._maintenance.perform(self._clock.now()):
            self._look_at = self._claim_at = float("-inf")
            self._settled_since = None
            for name in ("lease", "feed", "validate", "finish"):
                self._loops[name].wake()
        return False

    # Shared by the loops.

    @property
    def _room(self) -> int:
        """Number of further lines that can be started."""
        room, most = self._executor.room, self._options.concurrency
        return max(0, room if most is None else min(room, most - self.in_flight))

    @property
    def _places(self) -> int:
        """Approximate number of lines that are computed at once."""
        stats = engine_stats_of(self._inference)
        return self._options.concurrency or (stats.max_num_seqs if stats is not None else 0) or _USUAL_PLACES

    def _fill(self) -> None:
        for _ in range(self._room):
            if (item := self._claimed.next()) is None:
                return
            self._executor.start(item)

    def _following(self) -> Item | None:
        """Return the line to compute in place of one that has just ended."""
        return self._claimed.next() if self._room else None

    def _line_ended(self, item: Item, outcome: Outcome) -> None:
        line, content = item
        if isinstance(outcome, Exception) and hides_details(outcome):
            _log.warning("line %d of %s failed: %s", line.number, line.batch_id, outcome)
        result = output_lines.result_of(line, outcome)
        if result is not None:
            self._rates.forecasts.ended(line, content, outcome if isinstance(outcome, dict) else None)
        self._claimed.end(line, result)
        self._plan.ended()
        self._moved.set()
        if result is None:
            self._claim_at = self._rest_until = self._clock.now() + _REST
        self._loops["commit"].wake()
        self._wake_feed_when_low()

    def _wake_feed_when_low(self) -> None:
        if self._plan.low(len(self._claimed.waiting)):
            self._loops["feed"].wake()

    def _count(self, results: list[LineResult], taken: list[bool]) -> None:
        self.stats.commits += 1
        committed = [*compress(results, taken)]
        for batch_id, count in Counter(result.batch_id for result in committed).items():
            self._rates.committed(batch_id, count, self._clock.now())
        succeeded = sum(result.succeeded for result in committed)
        self.stats.succeeded += succeeded
        self.stats.failed += len(committed) - succeeded
        self.stats.refused += len(results) - len(committed)

    def _lease_lost(self) -> None:
        self.stats.leases_lost += 1
        self._claimed.clear()

    async def _idle(self) -> bool:
        if not self._rests():
            return False
        batches = await self._store.count_batches()
        lines = await self._store.count_lines()
        if lines.get("claimed", 0) or any(
            batches.get(status, 0) for status in ("validating", "finalizing", "cancelling")
        ):
            self._settled_since = None
            return False
        if lines.get("pending", 0) + lines.get("suspect", 0):
            if self._settled_since is None:
                self._settled_since = self._claims_begun
                self._claim_at = min(self._claim_at, self._rest_until)
                self._loops["feed"].wake()
            # Only lines of paused batches are left when a claim begun since then found nothing.
            if self._empty_claim <= self._settled_since:
                return False
        return self._rests()

    def _rests(self) -> bool:
        return self._claimed.empty and all(self._loops[name].idle for name in ("validate", "finish", "maintenance"))

    async def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not reached():
                    self._moved.clear()
                    await self._moved.wait()

    async def _end(self, *names: str) -> None:
        tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
