"""The loop that feeds requests to a policy and carries out its decisions.

A core belongs to one asyncio event loop, and everything here is called in the thread of that loop, so nothing is
locked. It has no task of its own: an arrival, the end of a batch or a timer calls `_pump`, which asks the policy for
batches as long as the model can take them. So an idle core keeps nothing alive, and the policy is asked once for many
arrivals in one turn of the event loop. The work per request is kept small: requests without special options are handed
to the policy together, when it has to decide, and whatever can be counted per batch is counted for the batch as a
whole.

Invariants, whatever the policy and the model do:

- Each entry is answered exactly once, unless its caller is gone. It leaves the queue when it is dispatched, when its
  deadline passes, when its caller leaves, or when the core is closed; the first three are checked before every
  dispatch.
- A batch frees its slot when its model call ends, however it ends. A batch whose callers are all gone is cancelled, if
  the model can be.
- The requests of a failed batch are computed again in parts, as described in `policies/search.py`, beside waiting ones:
  a free slot goes to a part if nothing else can be dispatched, and otherwise for `RETRY_SHARE` of the time that others
  had. So one bad request does not stop all others. A suspect that would be late is not computed again.
- A model that fails every request gets one request at a time, the first of each batch (`policies/breaker.py`).
- The policy is asked whenever something has changed while the model could take a batch, and at the time that it named.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import cast

from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.computation import BatchExecutor, RunningBatch
from batchwright.batcher.entry import Entry
from batchwright.batcher.model import DEADLINES_PASSED, Runner
from batchwright.batcher.retries import Retries
from batchwright.batcher.token_lengths import Measure
from batchwright.batcher.waiting_limits import WaitingLimits, model_down, overloaded
from batchwright.clock import Clock
from batchwright.errors import BatcherClosed, DeadlineExceeded, GenerationError, InvalidRequest
from batchwright.policies import Backlog, Dispatch, Reason
from batchwright.policies.search import Search

_log = logging.getLogger("batchwright.batcher")

_NEVER = math.inf
_SURE = 0.98
"""Fraction of its expected time that a batch takes at least."""
_ALL_LATE = 8
"""Most consecutive batches that are not computed because all of their requests would be late."""
_DONE_KEPT = 64
"""Answered entries that the heap of deadlines may hold in addition to twice the unanswered ones."""

_COMPUTING: ContextVar[tuple[RunningBatch, ...]] = ContextVar("batches being computed", default=())
"""Batches, of any batchers, inside whose model calls the current code runs. Code that outlives a call keeps it."""


class DispatchLoop:
    """One queue, one policy, one model, in one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runner: Runner,
        backlog: Backlog,
        measure: Measure,
        clock: Clock,
        limits: WaitingLimits,
        stats: BatcherStats,
    ) -> None:
        self.loop = loop
        self.clock = clock
        self._runner = runner
        self._backlog = backlog
        self._limits = limits
        self._stats = stats
        self._computer = BatchExecutor(
            runner, backlog, measure, clock, stats, isolate=limits.isolate, retries=limits.retries
        )
        self._groups: set[RunningBatch] = set()
        self._all_late = 0
        """Consecutive batches whose requests would all have been late."""
        self._retries = Retries(isolate=limits.isolate)
        self._arrived: list[Entry] = []
        """Requests that are not in the backlog yet. They count as waiting."""
        self._room = 0
        """Number of requests that can still be admitted without recounting the queue."""
        self._waiting_tokens = 0
        """Sum of their lengths, where that is limited."""
        self._deadlines: list[tuple[float, int, Entry]] = []
        self._entered = 0
        self._pumping = False
        """Whether `_pump` is about to be called."""
        self.moment: float | None = None
        """When the last request in `_arrived` came; one turn of the event loop counts as one moment."""
        self._timer: asyncio.TimerHandle | None = None
        self._rings = math.inf
        """When the timer calls `_turn`."""
        self._closing = False
        self._aborted = False
        """Whether the batcher is closing and computes nothing any more."""
        self._emptied: list[asyncio.Future[None]] = []
        stats.memory_limit_mb = backlog.memory_limit_mb

    @property
    def is_empty(self) -> bool:
        return not (self._groups or len(self._backlog) or not self._retries.is_empty or self._arrived)

    @property
    def arrived(self) -> int:
        """Number of waiting requests that are not in the backlog yet."""
        return len(self._arrived)

    @property
    def waiting(self) -> Sequence[Entry]:
        """Waiting requests in dispatch order, then those that are not in the backlog yet."""
        return [*cast("Sequence[Entry]", self._backlog.items), *self._arrived]

    def enter(self, entry: Entry) -> None:
        """Take a new entry.

        Raises `BatcherClosed`, `Overloaded`, `InvalidRequest` if no batch can hold it, `DeadlineExceeded` if it is
        certain to be late, and RuntimeError if it comes from the very model that computes here.
        """
        if self._groups and not self._groups.isdisjoint(_COMPUTING.get()):
            raise RuntimeError(
                "the model asked the batcher that it computes for, which would wait for it for ever: call the model "
                "itself, or give it a batcher of its own"
            )
        if self._room and entry.due == _NEVER:
            self._room -= 1
            self._arrived.append(entry)
        else:
            self._enter_alone(entry)
            self._stats.requests += 1
        if self._pumping:
            self.moment = entry.arrival
        elif len(self._groups) < self._runner.slots:
            self.moment = entry.arrival
            self._wake()
        elif (changes := self._runner.changes_at(entry.arrival)) < self._rings:
            self._arm(changes)

    def _enter_alone(self, entry: Entry) -> None:
        """Take one entry, as `enter` does; raises the same errors."""
        if self._closing:
            raise BatcherClosed("the batcher is closed: it takes no more requests")
        self.place_arrived()
        self._check_room(entry)
        try:
            self._backlog.add((entry,))
        except InvalidRequest:
            self._stats.count_refusal(entry, "too_large")
            raise
        if entry.due < math.inf:
            try:
                self._check_hope(entry)
            except Exception:
                self._remove(entry)
                raise
            self._stats.with_deadline += 1
            self._remember(entry)
        self._count_tokens([entry])
        self._count_room()

    def place_arrived(self) -> None:
        """Hand the policy the requests that arrived since the last call. Must be called in the core's loop."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            self._stats.requests += len(arrived)
            try:
                self._backlog.add(arrived)
            except Exception as error:
                self._fail_by_policy(arrived, error, self.clock.now())

    def _count_tokens(self, entries: Sequence[Entry], sign: int = 1) -> None:
        """Count the lengths of `entries` as waiting, or with `sign` -1 as not waiting any more."""
        if self._limits.waiting_tokens is not None:
            self._waiting_tokens += sign * sum([entry.length for entry in entries])

    def _count_room(self) -> None:
        if self._backlog.takes_many and not self._closing and self._limits.waiting_tokens is None:
            self._room = max(0, self._limits.waiting - len(self._backlog) - len(self._retries) - len(self._arrived))

    def leave(self, entry: Entry, *, is_moved: bool = False) -> None:
        """Record that the caller of `entry` is gone: it is not computed any more, if that can be avoided."""
        if not entry.future.cancelled():
            # It was answered before its caller could see the answer.
            return
        self._stats.cancelled += 1
        self._let_go(entry)
        if not is_moved:
            entry.abandon(self.clock.now())

    async def close(self, *, drain: bool) -> None:
        """Compute waiting requests or, without `drain`, answer `BatcherClosed`. Returns once all are answered."""
        self._closing = True
        self._room = 0
        if drain:
            self._wake()
        else:
            self._abort()
        if not self.is_empty:
            emptied = self.loop.create_future()
            self._emptied.append(emptied)
            await emptied
        self._arm(math.inf)

    def empty(self) -> list[Entry]:
        """Remove and return everything that is not in the model, without an answer."""
        self.place_arrived()
        waiting = cast("Sequence[Entry]", self._backlog.items)
        entries = sorted([*self._retries.waiting, *waiting], key=lambda entry: entry.arrival)
        for entry in entries:
            self._forget(entry)
        self._retries.remove_all()
        return entries

    def abandon(self) -> None:
        """Forget all entries: the event loop has ended, along with all callers."""
        self._stats.cancelled += self._unanswered
        self.empty()
        self._groups.clear()

    def _abort(self) -> None:
        now = self.clock.now()
        self._aborted = True
        for entry in self.empty():
            self._fail_closed(entry, now)
        for group in list(self._groups):
            for entry in group.entries:
                self._fail_closed(entry, now)
            if group.task is not None:
                group.task.cancel()

    def _check_room(self, entry: Entry) -> None:
        waiting = len(self._backlog) + len(self._retries)
        reason = self._limits.exceeded(waiting, self._waiting_tokens, entry.length)
        if reason is not None:
            self._stats.count_refusal(entry, "overloaded")
            work = self._backlog.predict()
            after = None if work is None else self._slot_free_in(self.clock.now()) + work / self._runner.slots
            raise overloaded(reason, after)

    def _check_hope(self, entry: Entry) -> None:
        """Raise `DeadlineExceeded` if even the low estimate says that `entry` will be late."""
        if not self._groups and len(self._backlog) <= 1:
            # Nothing is ahead of it. Computing it also keeps what has been learned up to date.
            return
        work = self._backlog.predict(entry)
        if work is None:
            return
        # The slots share the work of others; dividing its own work as well only lowers the estimate.
        latency = self._slot_free_in(entry.arrival) + work / self._runner.slots
        allowed = entry.due - entry.arrival
        if latency > allowed:
            self._stats.count_refusal(entry, "refused")
            raise DeadlineExceeded(
                f"refused: it would take at least {latency * 1e3:.4g} ms, its deadline is in {allowed * 1e3:.4g} ms: "
                "try again when less waits, or allow more time",
                predicted_ms=latency * 1e3,
            )

    def _slot_free_in(self, now: float) -> float:
        if len(self._groups) < self._runner.slots:
            return 0.0
        return max(0.0, min(map(self._ends, self._groups)) - now)

    def _ends(self, group: RunningBatch) -> float:
        """Return when a batch is expected to end, or a time in the past."""
        if group.ends is None:
            entries = group.entries
            cells = max([entry.length for entry in entries], default=0) * len(entries)
            group.ends = group.begins + (self._backlog.seconds(cells, len(entries)) or 0.0)
        return group.ends

    def _remember(self, entry: Entry) -> None:
        heap = self._deadlines
        if len(heap) > _DONE_KEPT and len(heap) > 2 * self._unanswered + _DONE_KEPT:
            heap[:] = [known for known in heap if known[2].waits_for_answer]
            heapq.heapify(heap)
        self._entered += 1
        heapq.heappush(heap, (entry.due, self._entered, entry))
        if entry.due < self._rings:
            self._arm(entry.due)

    @property
    def _unanswered(self) -> int:
        waiting = len(self._arrived) + len(self._backlog) + len(self._retries)
        return waiting + sum(group.wanted for group in self._groups)

    def _wake(self) -> None:
        if not self._pumping:
            self._pumping = True
            self.loop.call_soon(self._pump)

    def _arm(self, at: float) -> None:
        """Set the timer to `at`; infinite: cancel it. A leftover timer would keep this object alive."""
        if at == self._rings:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._rings = at
        if at < math.inf:
            self._timer = self.loop.call_later(max(0.0, at - self.clock.now()), self._ring, at)

    def _ring(self, at: float) -> None:
        self._timer = None
        self._rings = math.inf
        now = self.clock.now()
        self._backlog.timer_was_late(now - at)
        # The event loop may be early by a rounding error, for which we do not wait.
        self._turn(max(now, at))

    def _pump(self) -> None:
        self._pumping = False
        self.moment = None
        self._turn(self.clock.now())

    def _turn(self, now: float) -> None:
        self._expire(now)
        ask_again = math.inf
        try:
            ask_again = self._dispatch(now)
        except Exception as error:
            self._fail_by_policy(self.empty(), error, now)
        self._arm(
            min(
                ask_again,
                self._retries.next_try,
                self._deadlines[0][0] if self._deadlines else math.inf,
                self._runner.changes_at(now) if len(self._backlog) or not self._retries.is_empty else math.inf,
            )
        )
        self._count_room()
        if self.is_empty:
            for emptied in self._emptied:
                if not emptied.done():
                    emptied.set_result(None)
            self._emptied.clear()

    def _fail_by_policy(self, entries: Sequence[Entry], error: Exception, now: float) -> None:
        """Answer requests that have left the queue, because the policy raised `error`."""
        _log.error("the policy failed; %d waiting requests are answered with an error", len(entries), exc_info=error)
        for entry in entries:
            failure = GenerationError(f"the policy failed with {type(error).__name__}: {error}")
            failure.__cause__ = error
            entry.fail(failure, now, self._stats)

    def _dispatch(self, now: float) -> float:
        """Fill the free slots, and return when to ask the policy again. Raises what the policy raises."""
        self.place_arrived()
        self._retries.begin_due(now, early=self._closing)
        while len(self._groups) < self._runner.slots:
            if self._retries.breaker.is_doubtful and self._groups:
                return math.inf  # one request at a time
            if self._retries.is_due and self._retry(now):
                continue
            decision = self._backlog.decide(now, drain=self._closing)
            if isinstance(decision, Dispatch):
                if not decision.items:
                    raise RuntimeError("it dispatched a batch without requests")
                self._start(cast(list[Entry], decision.items), decision.reason, now)
            elif not self._retry(now):
                if self._closing and len(self._backlog):
                    raise RuntimeError(f"told to drain, it held {len(self._backlog)} requests back")
                return decision.until
        return math.inf

    def _expire(self, now: float) -> None:
        heap = self._deadlines
        while heap and (heap[0][0] <= now or not heap[0][2].waits_for_answer):
            entry = heapq.heappop(heap)[2]
            if entry.waits_for_answer:
                self._let_go(entry, DEADLINES_PASSED)
                entry.expire(now, self._stats)

    def _let_go(self, entry: Entry, why: str | None = None) -> None:
        """Stop computing `entry`; a batch that no caller wants any more is cancelled with the message `why`."""
        group = entry.group
        if group is None:
            self._forget(entry)
            # The policy may now decide differently about the rest, and a closing core may be empty.
            self._wake()
            return
        group.wanted -= 1
        if not group.wanted and not self._runner.in_thread and group.task is not None:
            group.task.cancel(why)

    def _forget(self, entry: Entry) -> None:
        """Remove `entry` from the waiting entries, if it is among them."""
        self.place_arrived()
        if entry in self._retries.waiting:
            self._retries.waiting.discard(entry)
        elif not self._remove(entry):
            return
        self._count_tokens([entry], -1)

    def _remove(self, entry: Entry) -> bool:
        try:
            return self._backlog.remove(entry)
        except Exception:
            # Each entry must be answered nevertheless, and others must be served.
            _log.exception("the policy failed to let go of a request")
            return True

    def _start(self, entries: list[Entry], reason: Reason, now: float) -> None:
        self._count_tokens(entries, -1)
        search: Search[Entry] | None = None
        if self._deadlines or self._retries.breaker.is_doubtful:
            # Otherwise entries whose callers leave in this very turn are left out when the batch begins.
            entries = [entry for entry in entries if entry.waits_for_answer]
        if self._deadlines and entries:
            entries = self._in_time(entries, now)
        if entries and self._retries.breaker.is_doubtful:
            self._count_tokens(entries)
            entries, search = self._retries.divided(entries)
            self._count_tokens(entries, -1)
        if entries:
            self._launch(self._group(entries, now, search), reason)

    def _in_time(self, entries: list[Entry], now: float) -> list[Entry]:
        """Drop requests that this batch would answer too late, and answer them now."""
        seconds = self._backlog.seconds(max(entry.length for entry in entries) * len(entries), len(entries)) or 0.0
        late = [entry for entry in entries if entry.due < now + _SURE * seconds]
        self._all_late = self._all_late + 1 if len(late) == len(entries) else 0
        is_all = not self._groups and not len(self._backlog)
        if self._all_late > (0 if is_all else _ALL_LATE):
            # What has been learned about the model may have become wrong; and if no other request waits, trying costs
            # nothing.
            self._all_late = 0
            return entries
        for entry in late:
            self._refuse_late(entry, now, seconds, "it would be late")
        return [entry for entry in entries if entry.waits_for_answer] if late else entries

    def _retry(self, now: float) -> bool:
        """Compute a part of a failed batch. False if there is none."""
        while (search := self._retries.next_search()) is not None:
            for entry in search.left():
                self._give_up(entry, now)
            if part := self._retries.next_part(search):
                self._count_tokens(part, -1)
                self._launch(self._group(part, now, search), Reason.RETRY)
                return True
        return False

    def _give_up(self, entry: Entry, now: float) -> None:
        """Answer a suspect that would be late even if it were computed at once."""
        alone = self._backlog.seconds(entry.length, 1) or 0.0
        if entry.due < now + alone and entry.waits_for_answer:
            self._forget(entry)
            self._refuse_late(entry, now, alone, "its batch failed, and computed again it would be late")

    def _refuse_late(self, entry: Entry, now: float, seconds: float, why: str) -> None:
        latency, allowed = (now + seconds - entry.arrival) * 1e3, (entry.due - entry.arrival) * 1e3
        error = DeadlineExceeded(
            f"not computed: {why}, after {latency:.4g} ms with a deadline of {allowed:.4g} ms", predicted_ms=latency
        )
        entry.expire(now, self._stats, error)

    def _group(self, entries: list[Entry], now: float, search: Search[Entry] | None = None) -> RunningBatch:
        is_charged = search is not None and len(self._backlog) > 0
        return RunningBatch(entries, len(entries), now, search, is_charged)

    def _launch(self, group: RunningBatch, reason: Reason) -> None:
        self._stats.count_batch(str(reason), len(group.entries))
        now, entries = group.begins, group.entries
        new = entries if group.search is None else [entry for entry in entries if entry.started is None]
        if new:
            arrivals = [entry.arrival for entry in new]
            self._stats.count_starts(arrivals, now)
            if new is entries:
                group.arrivals = arrivals
        for entry in new:
            entry.group = group
            entry.started = now
        for entry in entries if new is not entries else ():
            entry.group = group
        self._groups.add(group)
        group.task = self.loop.create_task(self._run(group))
        group.task.add_done_callback(self._never_ran)

    def _never_ran(self, task: asyncio.Task[None]) -> None:
        """Answer a batch whose task was cancelled before its first step."""
        for group in [group for group in self._groups if group.task is task]:
            self._end(group, None)

    async def _run(self, group: RunningBatch) -> None:
        error: BaseException | None = None
        # Ended batches are left out: a batch inherits the context of the one that made room for it.
        _COMPUTING.set((*[each for each in _COMPUTING.get() if each.task and not each.task.done()], group))
        if group.task is not None:
            group.task.remove_done_callback(self._never_ran)
        try:
            await self._computer.compute(group)
        except asyncio.CancelledError:
            raise
        except BaseException as raised:
            error = raised
            raise
        finally:
            # In the same turn as the answers: callers that get one find the slot free.
            self._end(group, error)

    def _end(self, group: RunningBatch, error: BaseException | None) -> None:
        """Free the slot once all requests are answered. Does nothing when called again."""
        if group not in self._groups:
            return
        now = self.clock.now()
        suspects = [entry for entry in group.suspects if entry.waits_for_answer]
        if error is not None or self._aborted:
            suspects, group.to_retry = [], []
        again = {*suspects, *group.to_retry}
        # Nearly always all are answered already.
        for entry in group.entries if group.wanted else ():
            if error is not None:
                entry.fail(error, now, self._stats)
            elif entry not in again:
                self._fail_closed(entry, now)
        self._groups.discard(group)
        if not self._aborted:
            self._try_again(group, suspects, now)
        self._retries.account(group, now - group.begins)
        self._wake()
        if group.fitted or group.failed:
            self._backlog.learn_memory(group.fitted, group.failed)
            self._stats.memory_limit_mb = self._backlog.memory_limit_mb
        group.entries, group.fitted, group.failed = [], [], []

    def _try_again(self, group: RunningBatch, suspects: list[Entry], now: float) -> None:
        """Keep the requests to be computed again, and answer those that will not be, since the model is down."""
        retries = self._retries
        to_retry = [entry for entry in group.to_retry if entry.waits_for_answer]
        if suspects or to_retry:
            self._room = 0
            self._count_tokens([*suspects, *to_retry])
        for entry in (*suspects, *to_retry):
            entry.group = None
        for entry in to_retry:
            retries.pause(entry, now)
        given_up = retries.ended(group, suspects, now)
        self._count_tokens(given_up, -1)
        for entry in given_up:
            error = cast(BaseException, group.error)
            if entry.started is None:
                error = model_down(error, retries.breaker.retry_after(now))
            entry.fail(error, now, self._stats)
        self._stats.is_model_down = retries.breaker.is_open

    def _fail_closed(self, entry: Entry, now: float) -> None:
        if entry.waits_for_answer:
            entry.fail(BatcherClosed("the batcher was closed before the request was finished"), now, self._stats)
