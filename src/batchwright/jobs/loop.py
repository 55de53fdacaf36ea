"""The loop of a job, which reads lines, calls an `Inference`, and writes results."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from batchwright.clock import Clock
from batchwright.errors import EndpointDown, EndpointError, RunFailed
from batchwright.inference.inference import Call, Inference, standing_of, why_not_ready
from batchwright.jobs.failures import RETRYABLE, Failures
from batchwright.jobs.job import Job
from batchwright.jobs.lines import BadLine
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import Record
from batchwright.lines.batch_line import (
    encode_answer,
    encode_failure,
    is_timeout,
    line_error,
    request_id,
    token_count,
)
from batchwright.lines.forecast import LONGEST_COUNTED, AnswerTally, answer_limit
from batchwright.lines.line_executor import LineExecutor, Outcome
from batchwright.lines.line_retries import RetryPolicy, nobody_computes, passing
from batchwright.request import SamplingParams

_LINES_IN_A_ROW = 256
"""Lines read at a time, so that a long run of bad or finished lines does not hold up lines being computed."""
_GRACE = 5.0
"""Seconds that lines under way are given to end after an interrupt."""
_SHOWN_EVERY = 0.1
"""Seconds between calls of `on_progress` while no line ends."""


@dataclass(slots=True)
class Tally:
    """Numbers of lines and tokens of this run so far."""

    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    failures: Failures = field(default_factory=Failures)
    lines_read: int = 0
    """Lines that were taken up; those that earlier runs finished do not count."""
    weight_read: int = 0
    """Sum of their weights, see `Record.weight`."""
    answers: AnswerTally = field(default_factory=AnswerTally)

    def succeed(self, answer: Mapping[str, Any], limit: int) -> None:
        """Count a line with its answer, each text of which could have had `limit` tokens."""
        self.succeeded += 1
        self.prompt_tokens += token_count(answer, "prompt_tokens")
        self.generated_tokens += token_count(answer, "completion_tokens")
        self.answers.count(answer, limit)


class _Line(NamedTuple):
    """A line to be computed."""

    number: int
    custom_id: str
    endpoint: str
    body: Mapping[str, object]


class JobLoop:
    """The loop that computes the lines of one job with one `Inference`. Holds only the lines being computed."""

    def __init__(
        self,
        job: Job,
        inference: Inference,
        sink: Sink,
        *,
        clock: Clock,
        defaults: SamplingParams | Mapping[str, Any],
        on_progress: Callable[[], None] = lambda: None,
        tally: Tally | None = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        """`on_progress` is called after lines ended, and about ten times a second. It may raise, which ends the run."""
        self.tally = tally or Tally()
        self._job = job
        self._inference = inference
        self._sink = sink
        self._clock = clock
        self._defaults = defaults
        self._limit = getattr(defaults, "max_tokens", LONGEST_COUNTED)
        self._on_progress = on_progress
        self._retries = retries or RetryPolicy()
        self._records: Iterator[Record] = job.source.records()
        self._exhausted = False
        self._returned: deque[_Line] = deque()
        """Lines that came back from an endpoint that was down, to be tried again."""
        self._away_since: float | None = None
        """Time since which no line can be computed; None if lines can be computed."""
        self._failure: BaseException | None = None
        """Error because of which the run cannot go on; None if it can."""
        self.stopping = False
        """Whether the run was interrupted, and only ends what is under way."""
        self._moved = asyncio.Event()
        """Set when a line ended, or the run cannot go on."""
        self._executor = LineExecutor[_Line](
            inference,
            call_of=self._call,
            done=self._done,
            following=self._following,
            timeout=None,
            retries=self._retries,
            clock=clock,
            draw=random.Random(),
        )

    def __len__(self) -> int:
        """Number of lines being computed."""
        return len(self._executor)

    @property
    def why_waiting(self) -> str | None:
        """Reason why no line can be computed now, or what lines wait for; None if there is none."""
        return why_not_ready(self._inference) or standing_of(self._inference) or self._executor.why_pausing

    async def run(self) -> None:
        """Work until every line is finished.

        Cancelled, it starts no further lines, and gives those under way a few seconds to end.

        Raises `InputError` if the input cannot be read on, OSError if results cannot be written, and `RunFailed` if no
        line can be computed for too long. Written results are kept, and the inference then holds none of the lines.
        """
        try:
            while not self._finished:
                self._moved.clear()
                filled = self._fill()
                self._require_going()
                if not filled:
                    await asyncio.sleep(0)
                elif not self._finished:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_SHOWN_EVERY):
                            await self._moved.wait()
                self._require_going()
                self._on_progress()
        except asyncio.CancelledError:
            await self._wind_down()
            raise
        finally:
            await self._executor.close()

    async def _wind_down(self) -> None:
        self.stopping = True
        # Lines in batches of a provider end here too: those go on there, and the next run finds them.
        self._executor.try_no_more()
        until = self._clock.now() + _GRACE
        while self._executor and self._failure is None and self._clock.now() < until:
            self._moved.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SHOWN_EVERY):
                    await self._moved.wait()
            self._on_progress()

    @property
    def _finished(self) -> bool:
        return self._exhausted and not self._executor and not self._returned

    def _require_going(self) -> None:
        """Raise the failure of the run, if any, and `RunFailed` if no line could be computed for too long."""
        if self._failure is not None:
            raise self._failure
        reason = why_not_ready(self._inference)
        if reason is None:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = self._clock.now()
        elif self._clock.now() - self._away_since > self._retries.longest:
            raise RunFailed(
                f"{reason}, for {self._retries.longest / 60:.0f} minutes now. Finished lines are kept: run the same "
                "command again when that has changed"
            )

    def _fill(self) -> bool:
        """Start as many lines as there is room for. False if other tasks should have a turn before that is done."""
        for _ in range(_LINES_IN_A_ROW):
            if self._executor.room <= 0 or self._failure is not None:
                return True
            line = self._next()
            if line is not None:
                self._executor.start(line)
            elif self._exhausted:
                return True
        return False

    def _following(self) -> _Line | None:
        """The line that a task computes after it ended another; None if there is none now."""
        if self._executor.room <= 0 or self._failure is not None or self.stopping:
            return None
        for _ in range(_LINES_IN_A_ROW):
            line = self._next()
            if line is not None or self._exhausted:
                return line
        return None

    def _next(self) -> _Line | None:
        """The next line, if it is to be computed. An error that ends the run is noted, not raised."""
        try:
            if self._returned:
                return self._returned.popleft()
            record = None if self._exhausted else next(self._records, None)
            if record is None:
                if not self._exhausted:
                    self._job.check_unchanged()
                self._exhausted = True
                return None
            if record.number in self._job.finished:
                return None
            self.tally.lines_read += 1
            self.tally.weight_read += record.weight
            line = self._job.parser.parse(record)
            custom_id, duplicate = self._job.ids.assign(line.number, line.custom_id)
            if isinstance(line, BadLine):
                self._fail(line.number, custom_id, line.error)
            elif duplicate is not None:
                self._fail(line.number, custom_id, duplicate)
            else:
                return _Line(line.number, custom_id, line.endpoint, line.body)
        except Exception as error:
            self._stop(error)
        return None

    def _call(self, line: _Line, pauses: Callable[[Exception | None], None]) -> Call:
        call_id = request_id(self._job.key, line.number)
        return Call(line.endpoint, line.body, call_id, "batch", pauses=pauses, defaults=self._defaults)

    def _done(self, line: _Line, outcome: Outcome) -> None:
        self._moved.set()
        if self._failure is not None:
            # Half a line may stand at the end of the output: it is repaired on resume, if nothing comes after it.
            return
        try:
            if isinstance(outcome, dict):
                self._sink.write(encode_answer(self._job.key, line.number, line.custom_id, outcome) + b"\n")
                self.tally.succeed(outcome, answer_limit(line.body, self._limit))
            elif isinstance(outcome, EndpointDown):
                self._returned.append(line)
            elif outcome is not None and nobody_computes(outcome):
                self._stop(outcome.__cause__ or outcome)
            elif isinstance(outcome, EndpointError) and self._is_refused_key(outcome):
                self._stop(
                    RunFailed(f"{outcome}. Finished lines are kept: run the same command again with a key that it does")
                )
            elif outcome is not None:
                self._fail(line.number, line.custom_id, outcome)
            elif not self.stopping:
                self._stop(RunFailed(f"line {line.number} was cancelled while it was computed: run the command again"))
        except Exception as error:
            self._stop(error)

    def _is_refused_key(self, error: EndpointError) -> bool:
        """Whether the error concerns every line. Once lines succeeded, a 403 is about the content of one line."""
        return error.status == 401 or (error.status == 403 and not self.tally.succeeded)

    def _stop(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._moved.set()

    def _fail(self, number: int, custom_id: str, error: Exception) -> None:
        again = passing(error) or is_timeout(error)
        failure = {**line_error(error), "line": number, RETRYABLE: again}
        self._sink.write(encode_failure(self._job.key, number, custom_id, failure) + b"\n")
        self.tally.failed += 1
        self.tally.failures.add(number, custom_id, failure)
