"""`Collector`: ends batches, delivers their results, and decides what happens to lines without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from batchwright.clock import Clock
from batchwright.errors import DeadlineExceeded, EndpointError, RunFailed
from batchwright.inference.batches.account import BatchAccount
from batchwright.inference.batches.deadline import Deadline
from batchwright.inference.batches.earlier_lines import EarlierLines
from batchwright.inference.batches.held import HeldLine, OpenBatch
from batchwright.inference.batches.journal import Journal
from batchwright.inference.batches.outcomes import Outcomes
from batchwright.inference.batches.provider import BatchProvider
from batchwright.inference.batches.queue_room import QueueRoom
from batchwright.inference.batches.results_file import custom_ids, results_in
from batchwright.inference.batches.submitter import is_final
from batchwright.submitting.endings import Problem, fate_without_result, reason_without_result
from batchwright.submitting.enqueueing import is_enqueued_limit

_IN_A_ROW = 128
"""Results delivered before other tasks get a turn."""
_INTERNAL = frozenset({"internal_error", "server_error", "internal_server_error"})
_GONE = frozenset({404, 410})
_MOST_FAILURES = 8
"""Consecutive failures, over some minutes, after which results are no longer waited for."""


class Collector:
    """Ends the batches in `batches`, each once, and forgets them.

    `again` puts a line into another batch; `deadline` is the job's deadline, if it has one.
    """

    def __init__(
        self,
        provider: BatchProvider,
        journal: Journal,
        batches: dict[str, OpenBatch],
        *,
        room: QueueRoom,
        outcomes: Outcomes,
        earlier: EarlierLines,
        account: BatchAccount,
        clock: Clock,
        again: Callable[[HeldLine], None],
        deadline: Deadline | None,
    ) -> None:
        self._provider = provider
        self._journal = journal
        self._batches = batches
        self._room = room
        self._outcomes = outcomes
        self._earlier = earlier
        self._account = account
        self._clock = clock
        self._again = again
        self._deadline = deadline

    async def end(self, batch: OpenBatch) -> None:
        """Take the results of a batch that has ended.

        Raises `EndpointError` if that must be retried, and `RunFailed` if retrying is useless.
        """
        remote = batch.remote
        assert remote is not None
        assert remote.ending is not None
        self._room.ended(batch)
        if remote.lost:
            self.lost(batch)
            return
        if remote.ending == "failed" and not remote.files:
            self._account.count_ending("failed")
            self._fail_whole(batch, remote.problems)
            return
        path = self._journal.results_path(batch.entry.uuid)
        if not await self._fetch(batch, path):
            self.lost(batch)
            return
        batch.entry = msgspec.structs.replace(batch.entry, stage="collected")
        self._journal.note(batch.entry)
        self._account.count_ending(remote.ending)
        await self._distribute(batch, path)
        for line in self._forget(batch):
            self._without_result(batch, line, None, others_blamed=False)

    async def _fetch(self, batch: OpenBatch, path: Path) -> bool:
        """Write the results of a batch to a file. False if they are gone. Raises the errors of `end`."""
        remote = batch.remote
        assert remote is not None
        try:
            if remote.succeeded and not remote.files:
                # The provider may say a little later where the results are. Without them the lines would be paid for
                # twice.
                remote = await self._provider.show(remote.id)
                if not remote.files and batch.failures >= _MOST_FAILURES:
                    return False
                if not remote.files:
                    raise EndpointError(f"the provider does not say yet where the results of the batch {remote.id} are")
            await self._provider.fetch(remote, path)
        except EndpointError as error:
            if error.status in _GONE:
                return False
            if is_final(error) and batch.failures >= _MOST_FAILURES:
                raise RunFailed(
                    f"the results of the batch {remote.id} cannot be fetched ({error}). They stay at the provider, and "
                    "finished lines are kept: run the same command again when that is mended"
                ) from error
            raise
        return True

    def lost(self, batch: OpenBatch) -> None:
        """End a batch that the provider no longer knows although it had it, or whose results it does not have."""
        gone = EndpointError(
            f"the provider has no batch {batch.entry.remote} any more, and with it are gone the results of its lines",
            status=404,
        )
        self._account.count_ending("lost")
        # It may have been computed, and is then charged.
        for left in batch.left.values():
            left.reservation.keep()
        batch.left.clear()
        for line in self.drop(batch):
            if batch.entry.leaving and self._deadline is not None:
                self._deadline.leave(line, may_be_paid=True)
            else:
                self._outcomes.lost(line, gone)

    def dissolve(self, batch: OpenBatch) -> None:
        """Put the lines of a batch that was not computed into others, which may be smaller."""
        for line in self.drop(batch):
            line.tries -= 1
            self._again(line)

    def refuse(self, batch: OpenBatch, error: EndpointError) -> None:
        """End a batch that the provider does not accept."""
        for line in self.drop(batch):
            self._outcomes.error(line, error)

    def drop(self, batch: OpenBatch) -> list[HeldLine]:
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

    async def _distribute(self, batch: OpenBatch, path: Path) -> None:
        """Deliver the results of a batch, and record where those are that no caller has asked for yet."""
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
        """End a batch that the provider refused after checking it."""
        first = problems[0] if problems else Problem(None, "the provider gives no reason")
        if any(is_enqueued_limit(each.code, each.message) for each in problems):
            self._room.refused(batch, first.message, self._clock.now())
            # The provider has recorded it as failed, so it cannot be submitted again unchanged.
            self.dissolve(batch)
            return
        blamed: Mapping[str, Problem] = {}
        if any(each.line is not None for each in problems):
            ids = [*custom_ids(self._journal.input_path(batch.entry.uuid))]
            blamed = {
                self._provider.line_name(ids[each.line - 1]): each
                for each in problems
                if each.line is not None and 0 < each.line <= len(ids)
            }
        for line in self.drop(batch):
            problem = blamed.get(line.name, None if blamed or first.code in _INTERNAL else first)
            self._without_result(batch, line, problem, others_blamed=bool(blamed) and line.name not in blamed)

    def _without_result(
        self, batch: OpenBatch, line: HeldLine, problem: Problem | None, *, others_blamed: bool
    ) -> None:
        ending = "failed" if batch.remote is None or batch.remote.ending is None else batch.remote.ending
        if batch.entry.leaving and self._deadline is not None:
            self._deadline.leave(line)
            return
        if fate_without_result(ending, line.tries, problem, others_blamed=others_blamed) == "again":
            self._account.again += 1
            self._again(line)
        elif problem is not None:
            body: dict[str, object] = {"code": problem.code, "message": problem.message, "param": None}
            self._outcomes.error(line, EndpointError(problem.message, status=400, body=body))
        elif ending == "expired":
            # The line executor must not treat this error as transient: the line had its tries.
            self._outcomes.error(line, DeadlineExceeded(reason_without_result(ending, line.tries)))
        else:
            message = reason_without_result(ending, line.tries)
            self._outcomes.error(
                line, EndpointError(message, body={"code": f"batch_{ending}", "message": message, "param": None})
            )
