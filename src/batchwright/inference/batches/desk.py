"""`BatchDesk`: gathers lines into batches, submits them, polls them, and delivers their results."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from batchwright.clock import Clock
from batchwright.errors import EndpointError, EngineClosed, RunFailed
from batchwright.inference.batches.account import BatchAccount, standing_text
from batchwright.inference.batches.collector import Collector
from batchwright.inference.batches.deadline import Deadline
from batchwright.inference.batches.earlier_lines import EarlierLines
from batchwright.inference.batches.gathering import Gathering
from batchwright.inference.batches.held import HeldLine, OpenBatch
from batchwright.inference.batches.journal import BatchEntry, Journal
from batchwright.inference.batches.outcomes import Outcomes
from batchwright.inference.batches.provider import NO_SUCH_API, BatchProvider
from batchwright.inference.batches.queue_room import QueueRoom
from batchwright.inference.batches.submitter import Refused, Submitter, concerns_all
from batchwright.inference.batches.times import BatchTimes
from batchwright.submitting.drafts import BatchLimits, Draft
from batchwright.submitting.looking import seconds_left

_log = logging.getLogger(__name__)
_TOO_MANY = 429
_LONGEST_WAIT = 600.0
"""Most seconds for which a provider's `retry-after` is obeyed."""
_GRACE = 5.0
"""Seconds to wait for the answer to a request to submit a batch when the run is stopped."""


class BatchDesk:
    """The owner of all batches of a job at one provider. All methods are called on one event loop.

    `folder` is that of the journal. `is_finished` tells for the id of a call whether it needs no result any more;
    `forgets_failures`: errors that earlier runs collected do not count.
    """

    def __init__(
        self,
        provider: BatchProvider,
        folder: Path,
        *,
        window: str,
        clock: Clock,
        unix_time: Callable[[], float],
        times: BatchTimes,
        account: BatchAccount,
        is_finished: Callable[[str], bool] = lambda name: False,
        forgets_failures: bool = False,
        deadline: float | None = None,
        moves: bool = False,
        lines_left: Callable[[], int] = lambda: 0,
        live_rate: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`deadline`: seconds from the beginning of the job; `moves`: whether lines then become live requests in time.

        `lines_left`: lines of the job that it has not received yet; `live_rate`: lines per second of live requests.
        """
        self._provider = provider
        self._folder = folder
        self._window = window
        self._clock = clock
        self._unix_time = unix_time
        self._times = times
        self._settles_in = provider.settles_in if times.settles_in is None else times.settles_in
        self.account = account
        self._is_finished = is_finished
        self._forgets_failures = forgets_failures
        self._gathering = Gathering(times.patience, self.limits_of)
        self._batches: dict[str, OpenBatch] = {}
        """Batches that were sealed but not collected, by uuid, in the order of sealing."""
        self._room = QueueRoom(self._batches.values(), times.full_for)
        self._outcomes = Outcomes(account)
        self._deadline = (
            None
            if deadline is None
            else Deadline(
                deadline,
                self._outcomes,
                moves=moves,
                keeps_cancelled=provider.keeps_cancelled,
                mover=times.mover,
                lines_left=lines_left,
                live_rate=live_rate,
            )
        )
        self._look_at = math.inf
        self._look_failures = 0
        self._answered_at = clock.now()
        self._is_silent = False
        self._moved = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._is_submitting = False
        self._closing = False
        self._failure: BaseException | None = None
        self._draw = random.Random()
        self.live = 0
        """Lines that are live requests now."""

    async def open(self) -> None:
        """Read the journal of earlier runs, and start working. Raises OSError."""
        self._journal = await asyncio.to_thread(Journal, self._folder, self._unix_time())
        self._submitter = Submitter(
            self._provider, self._journal, settles_in=self._settles_in, unix_time=self._unix_time
        )
        self._earlier = EarlierLines(
            self._provider,
            self._journal,
            is_finished=self._is_finished,
            forgets_failures=self._forgets_failures,
        )
        self._collector = Collector(
            self._provider,
            self._journal,
            self._batches,
            room=self._room,
            outcomes=self._outcomes,
            earlier=self._earlier,
            account=self.account,
            clock=self._clock,
            again=self._again,
            deadline=self._deadline,
        )
        for entry in [*self._journal.entries.values()]:
            if (batch := await asyncio.to_thread(self._earlier.recall, entry)) is not None:
                batch.progressed_at = self._clock.now()
                self._batches[entry.uuid] = batch
        if any(batch.entry.stage == "created" for batch in self._batches.values()):
            self._look_at = self._clock.now()
        self.account.resumed = len(self._batches)
        self._answered_at = self._clock.now()
        self._work = asyncio.create_task(self._run())

    # Lines.

    @property
    def unsent(self) -> int:
        """Number of batches that are sealed, or about to be, but not at the provider."""
        return self._gathering.full + sum(not batch.may_exist for batch in self._batches.values())

    @property
    def live_only(self) -> bool:
        """Whether the deadline is too near for further batches."""
        return self._deadline is not None and self._deadline.live_only

    def limits_of(self, model: str | None) -> BatchLimits:
        """The current limits of one batch."""
        limits = self._provider.limits
        most = self._room.most_of_one(model, self._clock.now())
        return BatchLimits(limits.lines, limits.size, most)

    def has_result(self, name: str) -> bool:
        """Whether the result of a line that no caller has asked for yet is here."""
        return self._earlier.has_result_of(name)

    def take(self, line: HeldLine) -> None:
        """Take a line; its future gets the outcome. Raises the error that stopped all lines, if there was one."""
        if self._failure is not None:
            raise EngineClosed(str(self._failure)) from self._failure
        found = self._earlier.take(line.name)
        if isinstance(found, OpenBatch):
            if (left := found.left.pop(line.name, None)) is not None:
                line.reservation.release()
                line.reservation = left.reservation
            found.held[line.name] = line
            line.is_noted = True
        elif found is not None:
            self._outcomes.result(line, found)
        else:
            self._again(line)

    def leave(self, line: HeldLine) -> None:
        """Record that no caller waits for a line any more. A result from its batch is kept for the next call."""
        if not line.is_noted:
            line.reservation.release()
        for batch in self._batches.values():
            if batch.held.get(line.name) is line:
                del batch.held[line.name]
                batch.left[line.name] = line
                self._earlier.put(line.name, batch)
                return

    def _again(self, line: HeldLine) -> None:
        """Put a line that is not in a batch into one, unless the deadline is too near."""
        line.is_noted = False
        if line.future.done():
            return
        if self._deadline is not None and self._deadline.live_only:
            self._deadline.leave(line)
        elif self._gathering.add(line, self._clock.now()):
            self._moved.set()

    # The loop.

    async def _run(self) -> None:
        try:
            while not self._closing:
                self._moved.clear()
                await self._turn()
                if self._closing:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._moved.wait()
        except Exception as error:
            if not isinstance(error, (RunFailed, OSError)):
                _log.exception("the work on a provider's batches ended")
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """End all waiting with `error`, which affects all lines."""
        self._failure = error
        for line in self._lines():
            stopped = EngineClosed(str(error))
            stopped.__cause__ = error
            self._outcomes.stopped(line, stopped)

    def _lines(self) -> Iterable[HeldLine]:
        yield from self._gathering
        yield from [line for batch in self._batches.values() for line in batch.held.values()]

    def _pause(self) -> float:
        """Return the seconds until there is something to do."""
        now = self._clock.now()
        due = [self._gathering.next_due(), self._look_at]
        for batch in self._batches.values():
            if batch.entry.stage != "created":
                has_room = self._room.takes(batch, now)
                due.append(batch.not_before if has_room else self._room.opens_at(batch, now))
            elif batch.has_ended:
                due.append(batch.not_before)
        if self._deadline is not None:
            due.append(now + max(1.0, min(self._time_left(self._deadline), self._times.looks.longest)))
        return max(0.0, min(min(due) - now, 3600.0))

    async def _turn(self) -> None:
        self._gathering.close_due(self._clock.now())
        while (gathered := self._gathering.next_full()) is not None:
            await self._seal(*gathered)
        for batch in [*self._batches.values()]:
            if self._closing:
                return
            if batch.entry.stage != "created" and self._is_due(batch) and self._room.takes(batch, self._clock.now()):
                self._is_submitting = True
                await self._guarded(batch, self._submit)
                self._is_submitting = False
        if self._look_at <= self._clock.now():
            await self._look()
        for batch in [*self._batches.values()]:
            if batch.has_ended and self._is_due(batch):
                await self._guarded(batch, self._collector.end)
        if self._deadline is not None:
            await self._keep_deadline(self._deadline)

    def _is_due(self, batch: OpenBatch) -> bool:
        return batch.not_before <= self._clock.now()

    async def _guarded(self, batch: OpenBatch, step: Callable[[OpenBatch], Awaitable[None]]) -> None:
        """Do a step with one batch. If it fails, it is repeated later."""
        try:
            await step(batch)
        except EndpointError as error:
            if not batch.failures or error.status == _TOO_MANY:
                batch.failing_since = self._clock.now()
            batch.failures += 1
            pause = self._times.retries.pause(batch.failures, self._draw.random())
            batch.not_before = self._clock.now() + max(pause, min(error.retry_after or 0.0, _LONGEST_WAIT))
            self._note_error(error, batch.failing_since)
        else:
            batch.failures = 0
            self._note_answer()

    def _note_answer(self) -> None:
        self._answered_at = self._clock.now()
        self._is_silent = False

    def _note_error(self, error: EndpointError, failing_since: float = math.inf) -> None:
        """Record an error of the provider. Raises `RunFailed` if it is permanent, or has lasted too long.

        `failing_since`: since when requests about one batch have failed, regardless of others.
        """
        if concerns_all(error):
            raise RunFailed(
                f"{error}. Batches at the provider go on, and finished lines are kept: run the same command again when "
                "that is mended"
            ) from error
        if error.status == _TOO_MANY:
            self._answered_at = self._clock.now()
        self._is_silent = True
        silence = self._clock.now() - min(self._answered_at, failing_since)
        _log.warning("the provider of batches fails, for %.0f s now: %s", silence, error)
        if silence > self._times.longest_silence:
            raise RunFailed(
                f"the provider has not answered for {silence / 3600:.0f} hours ({error}). Batches at the provider go "
                "on, and finished lines are kept: run the same command again when it answers"
            ) from error

    # From a draft to a batch at the provider.

    async def _seal(self, draft: Draft, gathered: list[HeldLine]) -> None:
        lines = [line for line in gathered if not line.future.done()]
        if not lines:
            return
        endpoint, model = lines[0].call.endpoint, lines[0].body.get("model")
        batch_uuid = str(uuid.uuid4())
        entry = BatchEntry(
            uuid=batch_uuid,
            stage="sealed",
            endpoint=endpoint,
            model=model,
            window=self._window,
            lines=len(lines),
            size=sum(line.size for line in lines),
            tokens=draft.tokens,
        )
        contents = (
            self._provider.line(self._provider.custom_id(batch_uuid, line.name), endpoint, line.body) + b"\n"
            for line in lines
        )
        batch = OpenBatch(entry, {line.name: line for line in lines}, progressed_at=self._clock.now())
        for line in lines:
            line.tries += 1
            line.is_noted = True
        self._batches[batch_uuid] = batch
        try:
            await asyncio.to_thread(self._journal.seal, entry, contents)
        except OSError:
            del self._batches[batch_uuid]
            self._gathering.put_back(draft, lines)
            raise

    async def _submit(self, batch: OpenBatch) -> None:
        known = {each.entry.remote for each in self._batches.values() if each.entry.remote is not None}
        known |= {entry.remote for entry in self._journal.entries.values() if entry.remote is not None}
        was_creating = batch.entry.stage == "creating"
        try:
            remote = await self._submitter.submit(batch, known)
        except Refused as refusal:
            if not refusal.is_full:
                self._require_api(refusal.error)
                self._collector.refuse(batch, refusal.error)
            elif self._room.refused(batch, str(refusal.error), self._clock.now()):
                self._collector.dissolve(batch)
            return
        if remote is None:
            batch.not_before = self._clock.now() + self._times.looks.pause([self._age(batch)], [math.inf], 0.0)
            return
        batch.remote = remote
        if not was_creating:
            self.account.submitted += 1
        self._plan_look()

    def _require_api(self, error: EndpointError) -> None:
        """Raise `RunFailed` if this endpoint seems to have no batch API."""
        if error.status in NO_SUCH_API and not self.account.submitted:
            raise RunFailed(
                f"{error}: it seems to have no batch API; have its lines computed with --via live"
            ) from error

    # Batches at the provider.

    async def _look(self) -> None:
        there = {batch.entry.remote: batch for batch in self._batches.values() if batch.entry.stage == "created"}
        ids = [each for each in there if each is not None]
        self._look_at = math.inf
        if not ids:
            return
        try:
            seen = await self._provider.look(ids)
        except EndpointError as error:
            self._look_failures += 1
            pause = self._times.retries.pause(self._look_failures, self._draw.random())
            self._look_at = self._clock.now() + max(pause, min(error.retry_after or 0.0, _LONGEST_WAIT))
            self._note_error(error)
            return
        self._look_failures = 0
        self._note_answer()
        now = self._clock.now()
        for remote_id in ids:
            batch = there[remote_id]
            if remote_id not in seen:
                # A batch that was just created may not be known everywhere at the provider.
                if self._age(batch) >= self._settles_in:
                    self._collector.lost(batch)
                continue
            before, batch.remote = batch.remote, seen[remote_id]
            if before is None or before.done != batch.remote.done:
                batch.progressed_at = now
            if batch.is_accepted:
                self._room.took(batch, now)
        self._plan_look()

    def _plan_look(self) -> None:
        """Set the time of the next poll."""
        now = self._clock.now()
        running = [batch for batch in self._batches.values() if batch.entry.stage == "created" and not batch.has_ended]
        ages = [self._age(batch) for batch in running]
        left = [seconds_left(age, *batch.counts) for age, batch in zip(ages, running, strict=True)]
        still = min((now - batch.progressed_at for batch in running), default=0.0)
        self._look_at = now + self._times.looks.pause(ages, left, still)

    def _age(self, batch: OpenBatch) -> float:
        """Return the seconds since a batch was created, or was about to be."""
        now = self._unix_time()
        return max(0.0, now - (now if batch.entry.attempted_at is None else batch.entry.attempted_at))

    # The deadline.

    async def _keep_deadline(self, deadline: Deadline) -> None:
        waiting = len(self._gathering) + self.live
        batches = deadline.given_up(self._time_left(deadline), [*self._batches.values()], self._age, waiting)
        if deadline.live_only:
            for line in self._gathering.let_go(self._clock.now()):
                deadline.leave(line)
        for batch in batches:
            if not batch.may_exist:
                for line in self._collector.drop(batch):
                    deadline.leave(line)
            elif (
                batch.entry.stage == "created"
                and not batch.has_ended
                and not batch.is_cancelled
                and self._is_due(batch)
            ):
                if not batch.entry.leaving:
                    batch.entry = msgspec.structs.replace(batch.entry, leaving=True)
                    self._journal.note(batch.entry)
                await self._guarded(batch, self._cancel)

    def _time_left(self, deadline: Deadline) -> float:
        return self._journal.begun + deadline.seconds - self._unix_time()

    async def _cancel(self, batch: OpenBatch) -> None:
        assert batch.entry.remote is not None
        batch.remote = await self._provider.cancel(batch.entry.remote)
        batch.is_cancelled = True
        self._look_at = min(self._look_at, self._clock.now() + self._times.looks.shortest)

    # What is reported.

    @property
    def standing(self) -> str | None:
        """A displayable text that says where the lines are; None if there are none."""
        now = self._clock.now()
        there = [batch for batch in self._batches.values() if batch.entry.stage == "created"]
        look = None if self._look_at == math.inf else max(0.0, self._look_at - now)
        return standing_text(
            [batch.counts for batch in there],
            gathered=len(self._gathering),
            waiting=len(self._batches) - len(there),
            live=self.live,
            next_look=look,
            silence=now - self._answered_at if self._is_silent else 0.0,
        )

    async def close(self) -> None:
        """Stop working. Batches at the provider continue; lines that are not in a batch are forgotten."""
        if self._work is None:
            return
        if self._deadline is not None:
            self.account.late_seconds = max(0.0, -self._time_left(self._deadline))
        self._closing = True
        self._moved.set()
        if self._is_submitting:
            # This avoids having to find out later whether the batch exists.
            await asyncio.wait({self._work}, timeout=_GRACE)
        self._work.cancel()
        await asyncio.gather(self._work, return_exceptions=True)
        self.account.at_provider = [
            batch.entry.remote
            for batch in self._batches.values()
            if batch.entry.remote is not None and not batch.has_ended
        ]
        self.account.unclear = sum(batch.entry.stage == "creating" for batch in self._batches.values())
        self._stop(self._failure or EngineClosed("the run has ended"))
        self._journal.close()
