"""The computation of one batch, and, if it fails, the search for the cause, or halving until it fits in memory."""

from __future__ import annotations

import asyncio
from asyncio import InvalidStateError
from collections.abc import Sequence

import msgspec

from batchwright.batcher.batcher_stats import BatcherStats
from batchwright.batcher.entry import Entry
from batchwright.batcher.model import Runner, is_being_cancelled, is_failure
from batchwright.batcher.token_lengths import Measure
from batchwright.clock import Clock
from batchwright.errors import InvalidRequest, OutOfMemory
from batchwright.out_of_memory import free_frames, ran_out_of_memory
from batchwright.policies import Backlog
from batchwright.policies.policy import sizes
from batchwright.policies.search import Search
from batchwright.request import InferenceResponse

_MAY_FAIL = (BaseException, InferenceResponse)


class RunningBatch(msgspec.Struct, eq=False):
    """A batch in the model."""

    entries: list[Entry]
    wanted: int
    """Number of its requests that are still waiting for an answer."""
    begins: float
    search: Search[Entry] | None = None
    """Search that this batch is a part of, if it is computed again after a failure."""
    is_charged: bool = False
    """Whether it is part of a search, and was computed although other requests waited."""
    ends: float | None = None
    """When it is expected to end, computed on demand."""
    arrivals: Sequence[float] | None = None
    """When its requests arrived, if that is listed already."""
    task: asyncio.Task[None] | None = None
    suspects: list[Entry] = msgspec.field(default_factory=list)
    """Unanswered requests, one of which caused a failure."""
    error: BaseException | None = None
    """The error with which it failed, unless memory ran out."""
    to_retry: list[Entry] = msgspec.field(default_factory=list)
    """Unanswered requests that failed by themselves, and are to be retried."""
    fitted: list[list[Entry]] = msgspec.field(default_factory=list)
    """Parts that were computed: the whole batch as one part, if nothing went wrong."""
    failed: list[list[Entry]] = msgspec.field(default_factory=list)
    """Parts for which memory ran out."""


class BatchExecutor:
    """Computes batches with a model: halves those that do not fit in memory and, with `isolate`, names suspects."""

    def __init__(
        self,
        runner: Runner,
        backlog: Backlog,
        measure: Measure,
        clock: Clock,
        stats: BatcherStats,
        *,
        isolate: bool,
        retries: int,
    ) -> None:
        self._runner = runner
        self._backlog = backlog
        self._measure = measure
        self._clock = clock
        self._stats = stats
        self._isolate = isolate
        self._most_tries = retries

    async def compute(self, group: RunningBatch) -> None:
        """Answer all of `group` except its suspects.

        Raises only what is not a failure of the model: cancellation, or an error in this code.
        """
        await self._compute(group, group.entries)

    async def _compute(self, group: RunningBatch, entries: list[Entry]) -> None:
        if group.wanted < len(group.entries):
            # Some have been answered, or their callers are gone.
            entries = [entry for entry in entries if entry.waits_for_answer]
        if entries:
            for part in await self._attempt(group, entries):
                await self._compute(group, part)

    async def _attempt(self, group: RunningBatch, entries: list[Entry]) -> list[list[Entry]]:
        """Compute `entries` together, answer those that are settled, and return the parts to be computed again.

        They are not computed again in here, where the error is still referenced, and with it the model's state.
        """
        begin = self._clock.now()
        takes_requests = self._runner.takes_requests
        requests = [entry.handed(begin) if takes_requests else entry.request for entry in entries]
        try:
            outputs = await self._runner.run([entry.prompt for entry in entries], requests)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return self._failed(group, entries, error)
        except Exception as error:
            return self._failed(group, entries, error)
        return self._succeeded(group, entries, outputs, begin)

    def _succeeded(
        self, group: RunningBatch, entries: list[Entry], outputs: list[object], begin: float
    ) -> list[list[Entry]]:
        now = self._clock.now()
        seconds, stats = now - begin, self._stats
        kinds = set(map(type, outputs))
        may_fail = any(issubclass(kind, _MAY_FAIL) for kind in kinds)
        if may_fail:
            computed = [entry for entry, output in zip(entries, outputs, strict=True) if not is_failure(output)]
        else:
            computed = entries
        tokens, cells = sizes(computed)
        stats.tokens += tokens
        stats.cells += cells
        stats.model_seconds += seconds
        stats.model_ms.add(seconds * 1e3)
        stats.recent_model_ms.append(seconds * 1e3)
        if may_fail:
            short, again = self._answer_each(group, entries, outputs, now)
        else:
            short, again = False, list[Entry]()
            self._answer_all(group, entries, outputs, now)
        if not short:
            group.fitted.append(entries)
            if computed:
                self._backlog.observe(cells, tokens, len(computed), seconds)
            return []
        stats.out_of_memory += 1
        group.failed.append(entries)
        # Those to be retried are fewer than before, even if not by half.
        return self._halves(again) if 2 * len(again) > len(entries) else [again]

    def _answer_all(self, group: RunningBatch, entries: list[Entry], outputs: list[object], now: float) -> None:
        """Answer with outputs, none of which is a failure."""
        generated, gone = 0, list[Entry]()
        for entry, output in zip(entries, outputs, strict=True):
            try:
                if entry.request is None:
                    entry.future.set_result(output)
                else:
                    generated += entry.respond(output, now, self._measure)
            except InvalidStateError:
                # This is rare, and checking each future first takes a sixth of the time of answering.
                gone.append(entry)
        answered = [entry for entry in entries if entry not in gone] if gone else entries
        group.wanted -= len(answered)
        self._stats.generated_tokens += generated
        self._stats.count_successes(answered, now, group.arrivals if answered is group.entries else None)

    def _answer_each(
        self, group: RunningBatch, entries: list[Entry], outputs: list[object], now: float
    ) -> tuple[bool, list[Entry]]:
        """Answer entries; return whether memory ran out for some, and which are to be computed again."""
        retries = len(entries) > 1 and self._retries(memory=True)
        short, again = False, list[Entry]()
        for entry, output in zip(entries, outputs, strict=True):
            if isinstance(output, (BaseException, InferenceResponse)) and ran_out_of_memory(output):
                short = True
                if retries:
                    again.append(entry)
                    continue
                if isinstance(output, BaseException):
                    output = _alone(output, entries)
            elif entry.tries < self._most_tries and _may_pass(output):
                group.to_retry.append(entry)
                continue
            if entry.waits_for_answer:
                group.wanted -= 1
                entry.succeed(output, now, self._measure, self._stats)
        return short, again

    def _failed(self, group: RunningBatch, entries: list[Entry], error: BaseException) -> list[list[Entry]]:
        """Answer all with the error, unless one request or the size of the batch may be the cause."""
        memory = ran_out_of_memory(error)
        if memory:
            free_frames(error)
            self._stats.out_of_memory += 1
            group.failed.append(entries)
        if len(entries) > 1 and self._retries(memory=memory):
            if memory:
                return self._halves(entries)
            self._stats.splits += 1
            group.error = error
            group.suspects += entries
            return []
        if memory:
            error = _alone(error, entries)
        else:
            group.error = error
        now = self._clock.now()
        for entry in entries:
            if not memory and len(entries) == 1 and entry.tries < self._most_tries and _may_pass(error):
                group.to_retry.append(entry)
            elif entry.waits_for_answer:
                group.wanted -= 1
                entry.fail(error, now, self._stats)
        return []

    def _retries(self, *, memory: bool) -> bool:
        return self._isolate or (memory and self._backlog.memory_limit_mb is not None)

    def _halves(self, entries: list[Entry]) -> list[list[Entry]]:
        self._stats.splits += 1
        middle = len(entries) // 2
        return [entries[:middle], entries[middle:]]


def _may_pass(output: object) -> bool:
    """Return whether `output` is a failure that may not recur, as opposed to one caused by the request."""
    error = output.error if isinstance(output, InferenceResponse) else output
    return isinstance(error, BaseException) and not isinstance(error, InvalidRequest)


def _alone(error: BaseException, entries: Sequence[Entry]) -> BaseException:
    """Return the error for a lack of memory, which says so if nothing smaller can be tried."""
    if len(entries) > 1 or isinstance(error, OutOfMemory):
        return error
    failure = OutOfMemory(
        f"memory ran out with this request alone ({type(error).__name__}: {error}): shorten it, lower max_tokens, or "
        "give the model more memory"
    )
    failure.__cause__ = error
    return failure
