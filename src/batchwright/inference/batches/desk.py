"""`BatchDesk`: gathers lines into batches, submits them, looks at them, and hands out their results."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import msgspec

from batchwright.clock import Clock
from batchwright.errors import DeadlineExceeded, EndpointError, EngineClosed, RunFailed
from batchwright.inference.batches.account import BatchAccount, standing_text
from batchwright.inference.batches.earlier_lines import EarlierLines
from batchwright.inference.batches.held import HeldLine, OpenBatch
from batchwright.inference.batches.journal import BatchEntry, Journal
from batchwright.inference.batches.outcomes import Outcomes
from batchwright.inference.batches.provider import NO_SUCH_API, BatchProvider
from batchwright.inference.batches.queue_room import QueueRoom
from batchwright.inference.batches.results_file import custom_ids, results_in
from batchwright.inference.batches.submitter import Refused, Submitter, concerns_all
from batchwright.inference.batches.times import BatchTimes
from batchwright.submitting.drafts import BatchLimits, Draft, Drafts
from batchwright.submitting.endings import Problem, fate_without_result, reason_without_result
from batchwright.submitting.enqueueing import is_enqueued_limit
from batchwright.submitting.looking import seconds_left
from batchwright.submitting.moving import BatchSoFar

_log = logging.getLogger(__name__)
_Kind: TypeAlias = tuple[str, str | None]
"""Endpoint and model."""

_TOKENS_PER_BYTE = 0.25
"""Prompt tokens in a byte of a line, about; limits are found by what is taken and refused, in the same measure."""
_IN_A_ROW = 128
"""Results handed out before others have a turn."""
_INTERNAL = frozenset({"internal_error", "server_error", "internal_server_error"})
_GONE = 404
_TOO_MANY = 429
_LONGEST_WAIT = 600.0
"""Most seconds that a provider's `retry-after` is followed."""
_GRACE = 5.0
"""Seconds that a request to submit a batch is given to be answered when the run is stopped."""


class BatchDesk:
    """One owner of all batches of a job at one provider. All methods are called on one event loop.

    `folder` is that of the journal. `is_finished` says of the id of a call whether it needs no result any more;
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

        `lines_left`: lines of the job that it has not got yet; `live_rate`: lines a second that live requests compute.
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
        self._deadline = deadline
        self._moves = moves
        self._lines_left = lines_left
        self._live_rate = live_rate
        self._drafts = Drafts(times.patience)
        self._drafted: dict[Draft, list[HeldLine]] = {}
        self._full: list[Draft] = []
        """Drafts that are to be sealed."""
        self._batches: dict[str, OpenBatch] = {}
        """Batches that were sealed and not collected, by uuid, in that order."""
        self._room = QueueRoom(self._batches.values(), times.full_for)
        self._outcomes = Outcomes(account)
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
        self.live_only = False
        """Whether the deadline is too near for further batches."""
        self.live = 0
        """Lines that are live requests now."""

    async def open(self) -> None:
        """Read the journal of earlier runs, and begin to work. Raises OSError."""
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
        """Number of batches that are sealed, or about to be, and not at the provider."""
        return len(self._full) + sum(not batch.may_exist for batch in self._batches.values())

    def limits_of(self, model: str | None) -> BatchLimits:
        """The most that one batch may have now."""
        limits = self._provider.limits
        most = self._room.most_of_one(model, self._clock.now())
        return BatchLimits(limits.lines, limits.size, most)

    def has_result(self, name: str) -> bool:
        """Whether the result of a line that nobody has asked for is here."""
        return self._earlier.has_result_of(name)

    def take(self, line: HeldLine) -> None:
        """Take a line; its future gets the outcome. Raises the error because of which no line is computed any more."""
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
        """Note that nobody waits for a line any more. If it is in a batch, its result is kept for the next call."""
        if not line.is_noted:
            line.reservation.release()
        for batch in self._batches.values():
            if batch.held.get(line.name) is line:
                del batch.held[line.name]
                batch.left[line.name] = line
                self._earlier.put(line.name, batch)
                return

    def _gather(self, line: HeldLine) -> None:
        kind: _Kind = (line.call.endpoint, line.body.get("model"))
        now = self._clock.now()
        draft, done = self._drafts.place(kind, line.size, line.size * _TOKENS_PER_BYTE, now, self.limits_of(kind[1]))
        if draft not in self._drafted:
            self._drafted[draft] = []
            self._moved.set()
        self._drafted[draft].append(line)
        if done:
            self._full += done
            self._moved.set()

    def _again(self, line: HeldLine) -> None:
        """Put a line that is in no batch into one, unless the deadline is too near."""
        line.is_noted = False
        if line.future.done():
            return
        if self.live_only:
            self._leave_batch(line)
        else:
            self._gather(line)

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
        """Let nobody wait any more: `error` concerns all lines."""
        self._failure = error
        for line in self._lines():
            stopped = EngineClosed(str(error))
            stopped.__cause__ = error
            self._outcomes.stopped(line, stopped)

    def _lines(self) -> Iterable[HeldLine]:
        yield from [line for lines in self._drafted.values() for line in lines]
        yield from [line for batch in self._batches.values() for line in batch.held.values()]

    def _pause(self) -> float:
        """Seconds until there is something to do."""
        now = self._clock.now()
        due = [self._drafts.next_due(), self._look_at]
        for batch in self._batches.values():
            if batch.entry.stage != "created":
                has_room = self._room.takes(batch, now)
                due.append(batch.not_before if has_room else self._room.opens_at(batch, now))
            elif batch.has_ended:
                due.append(batch.not_before)
        if self._deadline is not None:
            due.append(now + max(1.0, min(self._time_left(), self._times.looks.longest)))
        return max(0.0, min(min(due) - now, 3600.0))

    async def _turn(self) -> None:
        self._full += self._drafts.due(self._clock.now())
        while self._full:
            await self._seal(self._full.pop(0))
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
                await self._guarded(batch, self._end)
        if self._deadline is not None:
            await self._keep_deadline()

    def _is_due(self, batch: OpenBatch) -> bool:
        return batch.not_before <= self._clock.now()

    async def _guarded(self, batch: OpenBatch, step: Callable[[OpenBatch], Awaitable[None]]) -> None:
        """Do a step with one batch. If it fails, it is done again later."""
        try:
            await step(batch)
        except EndpointError as error:
            batch.failures += 1
            pause = self._times.retries.pause(batch.failures, self._draw.random())
            batch.not_before = self._clock.now() + max(pause, min(error.retry_after or 0.0, _LONGEST_WAIT))
            self._note_error(error)
        else:
            batch.failures = 0
            self._note_answer()

    def _note_answer(self) -> None:
        self._answered_at = self._clock.now()
        self._is_silent = False

    def _note_error(self, error: EndpointError) -> None:
        """Note an error of the provider. Raises `RunFailed` if it will not pass, or has lasted too long."""
        if concerns_all(error):
            raise RunFailed(
                f"{error}. Batches at the provider go on, and finished lines are kept: run the same command again when "
                "that is mended"
            ) from error
        if error.status == _TOO_MANY:
            self._answered_at = self._clock.now()
        self._is_silent = True
        silence = self._clock.now() - self._answered_at
        _log.warning("the provider of batches fails, for %.0f s now: %s", silence, error)
        if silence > self._times.longest_silence:
            raise RunFailed(
                f"the provider has not answered for {silence / 3600:.0f} hours ({error}). Batches at the provider go "
                "on, and finished lines are kept: run the same command again when it answers"
            ) from error

    # From a draft to a batch at the provider.

    async def _seal(self, draft: Draft) -> None:
        lines = [line for line in self._drafted.pop(draft) if not line.future.done()]
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
            self._drafted[draft] = lines
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
                self._refuse(batch, refusal.error)
            elif self._room.refused(batch, str(refusal.error), self._clock.now()):
                self._dissolve(batch)
            return
        if remote is None:
            batch.not_before = self._clock.now() + self._times.looks.pause([self._age(batch)], [math.inf], 0.0)
            return
        batch.remote = remote
        if not was_creating:
            self.account.submitted += 1
        self._plan_look()

    def _require_api(self, error: EndpointError) -> None:
        """Raise `RunFailed` if there seem to be no batches at this endpoint."""
        if error.status in NO_SUCH_API and not self.account.submitted:
            raise RunFailed(
                f"{error}: it seems to have no batch API; have its lines computed with --via live"
            ) from error

    def _dissolve(self, batch: OpenBatch) -> None:
        """Put the lines of a batch that was not computed into others, which may be smaller."""
        for line in self._drop(batch):
            line.tries -= 1
            self._again(line)

    def _refuse(self, batch: OpenBatch, error: EndpointError) -> None:
        """End a batch that the provider does not take."""
        for line in self._drop(batch):
            self._outcomes.error(line, error)

    def _drop(self, batch: OpenBatch) -> list[HeldLine]:
        """Forget a batch that has no results, and return the lines whose callers wait."""
        batch.entry = msgspec.structs.replace(batch.entry, stage="dropped")
        self._journal.note(batch.entry)
        return self._forget(batch)

    def _forget(self, batch: OpenBatch) -> list[HeldLine]:
        self._batches.pop(batch.entry.uuid, None)
        self._earlier.forget(batch)
        for left in batch.left.values():
            left.reservation.release()
        batch.left.clear()
        lines = [*batch.held.values()]
        batch.held.clear()
        return lines

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
                # One that was created just now may not be known everywhere at the provider.
                if self._age(batch) >= self._settles_in:
                    self._lost(batch)
                continue
            before, batch.remote = batch.remote, seen[remote_id]
            if before is None or before.done != batch.remote.done:
                batch.progressed_at = now
            if batch.is_accepted:
                self._room.took(batch, now)
        self._plan_look()

    def _plan_look(self) -> None:
        """Say when to look next."""
        now = self._clock.now()
        running = [batch for batch in self._batches.values() if batch.entry.stage == "created" and not batch.has_ended]
        ages = [self._age(batch) for batch in running]
        left = [seconds_left(age, *batch.counts) for age, batch in zip(ages, running, strict=True)]
        still = min((now - batch.progressed_at for batch in running), default=0.0)
        self._look_at = now + self._times.looks.pause(ages, left, still)

    def _age(self, batch: OpenBatch) -> float:
        """Seconds since a batch was created, or was about to be."""
        now = self._unix_time()
        return max(0.0, now - (now if batch.entry.attempted_at is None else batch.entry.attempted_at))

    def _lost(self, batch: OpenBatch) -> None:
        """End a batch that the provider does not know any more, though it had it."""
        gone = EndpointError(
            f"the provider has no batch {batch.entry.remote} any more, and with it are gone the results of its lines",
            status=_GONE,
        )
        self.account.count_ending("lost")
        # It may have been computed, and then is paid.
        for left in batch.left.values():
            left.reservation.keep()
        batch.left.clear()
        for line in self._drop(batch):
            self._outcomes.lost(line, gone)

    async def _end(self, batch: OpenBatch) -> None:
        """Take the results of a batch that has ended."""
        remote = batch.remote
        assert remote is not None
        assert remote.ending is not None
        self._room.ended(batch)
        if remote.ending == "failed" and not remote.files:
            self.account.count_ending("failed")
            self._fail_whole(batch, remote.problems)
            return
        path = self._journal.results_path(batch.entry.uuid)
        try:
            await self._provider.fetch(remote, path)
        except EndpointError as error:
            if error.status != _GONE:
                raise
            self._lost(batch)
            return
        batch.entry = msgspec.structs.replace(batch.entry, stage="collected")
        self._journal.note(batch.entry)
        self.account.count_ending(remote.ending)
        await self._distribute(batch, path)
        for line in self._forget(batch):
            self._without_result(batch, line, None, others_blamed=False)

    async def _distribute(self, batch: OpenBatch, path: Path) -> None:
        """Hand out the results of a batch, and note where those are that nobody has asked for yet."""
        for number, (result, offset, size) in enumerate(results_in(path, self._provider.result), start=1):
            if number % _IN_A_ROW == 0:
                await asyncio.sleep(0)
            name = self._provider.line_name(result.custom_id)
            if not result.computed:
                continue
            line = batch.held.pop(name, None)
            if line is not None:
                self._outcomes.result(line, result)
                continue
            if (left := batch.left.pop(name, None)) is not None:
                self._outcomes.result_of_left(left, result)
            self._earlier.has_result(name, batch, offset, size)

    def _fail_whole(self, batch: OpenBatch, problems: tuple[Problem, ...]) -> None:
        """End a batch that the provider refused when it had checked it."""
        first = problems[0] if problems else Problem(None, "the provider gives no reason")
        if any(is_enqueued_limit(each.code, each.message) for each in problems):
            self._room.refused(batch, first.message, self._clock.now())
            # The provider has it as one that failed, so it cannot be submitted again as it is.
            self._dissolve(batch)
            return
        blamed: Mapping[str, Problem] = {}
        if any(each.line is not None for each in problems):
            ids = [*custom_ids(self._journal.input_path(batch.entry.uuid))]
            blamed = {
                self._provider.line_name(ids[each.line - 1]): each
                for each in problems
                if each.line is not None and 0 < each.line <= len(ids)
            }
        for line in self._drop(batch):
            problem = blamed.get(line.name, None if blamed or first.code in _INTERNAL else first)
            self._without_result(batch, line, problem, others_blamed=bool(blamed) and line.name not in blamed)

    def _without_result(
        self, batch: OpenBatch, line: HeldLine, problem: Problem | None, *, others_blamed: bool
    ) -> None:
        ending = "failed" if batch.remote is None or batch.remote.ending is None else batch.remote.ending
        if batch.entry.leaving and self._deadline is not None:
            self._leave_batch(line)
            return
        if fate_without_result(ending, line.tries, problem, others_blamed=others_blamed) == "again":
            self.account.again += 1
            self._again(line)
        elif problem is not None:
            told: dict[str, object] = {"code": problem.code, "message": problem.message, "param": None}
            self._outcomes.error(line, EndpointError(problem.message, status=400, body=told))
        elif ending == "expired":
            # Not an error that may pass for the line executor: it had its tries.
            self._outcomes.error(line, DeadlineExceeded(reason_without_result(ending, line.tries)))
        else:
            message = reason_without_result(ending, line.tries)
            self._outcomes.error(
                line, EndpointError(message, body={"code": f"batch_{ending}", "message": message, "param": None})
            )

    # The deadline.

    def _time_left(self) -> float:
        assert self._deadline is not None
        return self._journal.begun + self._deadline - self._unix_time()

    async def _keep_deadline(self) -> None:
        left = self._time_left()
        if not self._moves:
            if left <= 0:
                self.live_only = True
                await self._give_up([*self._batches.values()])
            return
        there = [batch for batch in self._batches.values() if batch.entry.stage == "created" and not batch.has_ended]
        so_far = [BatchSoFar(batch, self._age(batch), *batch.counts) for batch in there if not batch.entry.leaving]
        leaving = sum(batch.counts[1] - batch.counts[0] for batch in there if batch.entry.leaving)
        unsent = sum(batch.entry.lines for batch in self._batches.values() if not batch.may_exist)
        waiting = self._drafts.lines + unsent + leaving + self.live + self._lines_left()
        plan = self._times.mover.plan(left, so_far, waiting, self._live_rate())
        self.live_only = not plan.gather
        chosen = {*plan.give_up}
        left_behind = [batch for batch in self._batches.values() if not batch.may_exist and self.live_only]
        await self._give_up([batch for batch in there if batch in chosen or batch.entry.leaving] + left_behind)

    async def _give_up(self, batches: list[OpenBatch]) -> None:
        """Cancel batches, so that their lines can go on otherwise, and let go of lines that are in none."""
        if self.live_only:
            self._full += self._drafts.due(self._clock.now(), more_may_come=False)
            for draft in self._full:
                for line in self._drafted.pop(draft, []):
                    self._leave_batch(line)
            self._full.clear()
        for batch in batches:
            if not batch.may_exist:
                for line in self._drop(batch):
                    self._leave_batch(line)
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

    async def _cancel(self, batch: OpenBatch) -> None:
        assert batch.entry.remote is not None
        batch.remote = await self._provider.cancel(batch.entry.remote)
        batch.is_cancelled = True
        self._look_at = min(self._look_at, self._clock.now() + self._times.looks.shortest)

    def _leave_batch(self, line: HeldLine) -> None:
        """Let a line go on that no batch computes any more because of the deadline."""
        if self._moves:
            self._outcomes.live(line)
        else:
            self._outcomes.error(line, DeadlineExceeded("the deadline of the run passed before the line was computed"))

    # What is told.

    @property
    def standing(self) -> str | None:
        """Where the lines are, fit to be shown; None if there is none."""
        now = self._clock.now()
        there = [batch for batch in self._batches.values() if batch.entry.stage == "created"]
        look = None if self._look_at == math.inf else max(0.0, self._look_at - now)
        return standing_text(
            [batch.counts for batch in there],
            gathered=sum(map(len, self._drafted.values())),
            waiting=len(self._batches) - len(there),
            live=self.live,
            next_look=look,
            silence=now - self._answered_at if self._is_silent else 0.0,
        )

    async def close(self) -> None:
        """Stop working. Batches at the provider go on; lines that are in none are forgotten."""
        if self._work is None:
            return
        self._closing = True
        self._moved.set()
        if self._is_submitting:
            # So that it need not be found out later whether the batch exists.
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
