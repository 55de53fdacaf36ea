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
from batchwright.errors import BudgetExhausted, ContextLengthExceeded, EndpointDown, EndpointError, RunFailed
from batchwright.inference.batches.provider_batches import InABatch
from batchwright.inference.inference import Call, Inference, pacing_of, send_no_more, standing_of, why_not_ready
from batchwright.jobs.common_failure import CommonFailure
from batchwright.jobs.failures import RETRYABLE, Failures
from batchwright.jobs.identical_lines import IdenticalLines
from batchwright.jobs.invalid_answers import InvalidAnswers, marked_invalid
from batchwright.jobs.job import Job
from batchwright.jobs.line_orders import LineOrder
from batchwright.jobs.lines import BadLine, Line
from batchwright.jobs.run_series import LengthSample
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import Record
from batchwright.lines.batch_line import (
    deduplicated,
    encode_answer,
    encode_failure,
    is_timeout,
    line_error,
    request_id,
    token_count,
)
from batchwright.lines.forecast import LONGEST_COUNTED, AnswerTally, answer_limit, default_limit, goes_on_to_its_limit
from batchwright.lines.line_executor import LineExecutor, Outcome
from batchwright.lines.line_retries import RetryPolicy, nobody_computes, passing
from batchwright.pacing.figures import PacerFigures
from batchwright.request import SamplingParams

_LINES_IN_A_ROW = 256
"""Lines read at a time, so that a long run of bad or finished lines does not hold up lines being computed."""
_GRACE = 5.0
"""Seconds for lines under way to end after an interrupt."""
_FEW = 20
"""Most lines left at the end that may fail by themselves."""
_SHOWN_EVERY = 0.1
"""Seconds between calls of `on_progress` while no line ends."""

_BYTES_OF_LINE = 256
"""Approximate bytes of a line without its body."""


@dataclass(slots=True)
class Tally:
    """Numbers of lines and tokens of this run so far."""

    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    failures: Failures = field(default_factory=Failures)
    lines_read: int = 0
    """Lines that were taken up, except those that earlier runs finished."""
    weight_read: int = 0
    """Sum of their weights, see `Record.weight`."""
    answers: AnswerTally = field(default_factory=AnswerTally)
    natural_answers: AnswerTally = field(default_factory=AnswerTally)
    """Those of `answers` that could end by themselves."""
    longest_answer: int = 0
    """Most tokens of the completions of a line."""
    cached_tokens: int = 0
    """Prompt tokens that were found in a cache of prompts."""
    deduplicated: int = 0
    """Lines that got the answer to an identical one. Their tokens are not in the figures above."""
    saved_prompt_tokens: int = 0
    """Tokens of their prompts, which were not computed."""
    saved_generated_tokens: int = 0
    asked_again: int = 0
    """Number of times that a line was sent again because its answer was not JSON."""
    invalid_answers: int = 0
    """Answers that were still not JSON then."""
    lengths: LengthSample = field(default_factory=LengthSample)
    """Expected and real lengths of answers."""

    def deduplicate(self, answer: Mapping[str, Any]) -> None:
        """Count a line that got the answer to an identical one."""
        self.succeeded += 1
        self.deduplicated += 1
        self.saved_prompt_tokens += token_count(answer, "prompt_tokens")
        self.saved_generated_tokens += token_count(answer, "completion_tokens")

    def count_tokens(self, answer: Mapping[str, Any]) -> None:
        """Count the tokens of an answer, whether or not its line is sent again."""
        self.prompt_tokens += token_count(answer, "prompt_tokens")
        self.generated_tokens += token_count(answer, "completion_tokens")
        self.cached_tokens += token_count(answer, "cached_tokens", "prompt_tokens_details")

    def succeed(self, answer: Mapping[str, Any], limit: int, *, is_natural: bool) -> None:
        """Count a line with its answer, each text of which could have had `limit` tokens.

        `is_natural`: whether the answer could end by itself.
        """
        self.succeeded += 1
        self.longest_answer = max(self.longest_answer, token_count(answer, "completion_tokens"))
        self.answers.count(answer, limit)
        if is_natural:
            self.natural_answers.count(answer, limit)


class _Line(NamedTuple):
    """A line to be computed."""

    number: int
    custom_id: str
    endpoint: str
    body: Mapping[str, object]
    weight: int
    """See `Record.weight`."""
    size: int
    """About the bytes of the body."""


class JobLoop:
    """The loop that computes the lines of one job with one `Inference`.

    Holds only the lines being computed, those in `order`, and those that wait for the answers to identical ones.
    """

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
        order: LineOrder[_Line] | None = None,
        identical: IdenticalLines[_Line] | None = None,
        cost_of: Callable[[str], float | None] | None = None,
        waits_for_batches: Callable[[], bool] = lambda: False,
        common: CommonFailure | None = None,
        invalid: InvalidAnswers | None = None,
        expected_tokens: Callable[[int], float | None] = lambda limit: None,
        records: Iterator[Record] | None = None,
    ) -> None:
        """`on_progress` is called after lines ended, and about ten times a second. It may raise, which ends the run.

        `order`: that in which lines are started; None: that of the input. `identical`: the lines that are sent only
        once; None: each is sent. `cost_of` returns what the answer to the call with that id cost, in dollars, which
        its `usage` then states. `waits_for_batches` returns whether there are lines left to read that earlier runs have
        paid for, so that these are started even if there is no money for others. `common`: decides whether the run ends
        because its first lines all fail for a reason of the job; None: it does not. `invalid`: decides which lines are
        sent again because their answers are not JSON; None: none is. `expected_tokens` returns how many tokens an
        answer with a given limit is expected to have if it begins now. `records`: the unfinished ones of the job, in
        the order in which they are read; None: in the order of the input.
        """
        self.tally = tally or Tally()
        self.pacing: Mapping[str, PacerFigures] = {}
        """What was found of the limits of an endpoint elsewhere, by model."""
        self._job = job
        self._inference = inference
        self._sink = sink
        self._clock = clock
        self._defaults = defaults
        self._limit = default_limit(defaults) or LONGEST_COUNTED
        self._on_progress = on_progress
        self._retries = retries or RetryPolicy()
        self._order = order
        self._identical = identical
        self._cost_of = cost_of
        self._waits_for_batches = waits_for_batches
        self._common = common
        self._invalid = invalid
        self._expected_tokens = expected_tokens
        self._asked_again: dict[int, _Line] = {}
        """Lines that are sent again because their answers were not JSON, by number."""
        self._expected: dict[int, float] = {}
        """Tokens that are expected of the answers to lines being computed, by line."""
        self._held_back: list[tuple[_Line, Exception]] = []
        """Lines that failed for a reason that may concern all. They are not written if the run ends because of it."""
        self._records = job.source.records() if records is None else records
        self._exhausted = False
        self._returned: deque[_Line] = deque()
        """Lines to be computed next: those returned by an endpoint that was down, to be tried again, and those that
        waited for the answer to a line that failed.
        """
        self._nothing_to_start = False
        """Whether no line could be read or taken up when one was last wanted."""
        self._away_since: float | None = None
        """Time since which no line can be computed; None if lines can be computed."""
        self._failure: BaseException | None = None
        """The error because of which the run cannot go on; None if it can."""
        self.stopping = False
        """Whether the run was interrupted, or its budget is spent, so that it only ends what is under way."""
        self._exhaustion: Exception | None = None
        """The error with which the run ends after that: nothing more can be paid for."""
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
    def is_stopped(self) -> bool:
        """Whether no line can be computed now."""
        return why_not_ready(self._inference) is not None

    @property
    def why_waiting(self) -> str | None:
        """Reason why no line can be computed now, or what lines wait for; None if there is none."""
        return why_not_ready(self._inference) or standing_of(self._inference) or self._executor.why_pausing

    async def run(self) -> None:
        """Work until every line is finished.

        When cancelled, it starts no further lines, and gives those under way a few seconds to end.

        Raises `InputError` if the rest of the input cannot be read, OSError if results cannot be written, `RunFailed`
        if no line can be computed for too long, and `BudgetExhausted`, once the lines under way have ended, if there is
        no money for further ones. Written results are kept, and the inference then holds none of the lines.
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
                self.pacing = pacing_of(self._inference)
                self._on_progress()
            if self._exhaustion is not None:
                self._keep_answers()
                raise self._exhaustion
            if self._held_back and self._common is not None:
                raise self._common.error
        except asyncio.CancelledError:
            await self._wind_down()
            raise
        finally:
            await self._executor.close()
            self.pacing = pacing_of(self._inference)

    def _keep_answers(self) -> None:
        """Write the latest answers to lines that cannot be sent again: another run would have to pay for them anew."""
        for line in [*self._asked_again.values()]:
            if self._invalid is not None and (answer := self._invalid.latest(line.number)) is not None:
                self._write_answer(line, answer)

    async def _wind_down(self) -> None:
        self.stopping = True
        # Lines in batches of a provider end here too: those go on there, and the next run finds them.
        send_no_more(self._inference)
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
        if self._executor:
            return False
        waits = bool(self._order) or bool(self._identical) or bool(self._returned)
        return self.stopping or (self._exhausted and not waits)

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
        # A few that are left at the end fail by themselves, once each has been tried for that long.
        has_succeeded = self.tally.succeeded + self._job.finished.succeeded > 0
        is_few = has_succeeded and self._exhausted and not self._order and len(self._executor) <= _FEW
        since = None if is_few else self._executor.failing_since
        if since is not None and self._clock.now() - since > self._retries.longest:
            raise RunFailed(
                f"no line was answered for {self._retries.longest / 60:.0f} minutes now: {self._executor.why_pausing}. "
                "Finished lines are kept: run the same command again when that has changed"
            )

    def _fill(self) -> bool:
        """Start as many lines as there is room for; return False if other tasks should have a turn in between."""
        for _ in range(_LINES_IN_A_ROW):
            if self._executor.room <= 0 or self._failure is not None or self.stopping:
                return True
            line = self._next()
            if line is not None:
                self._executor.start(line)
            elif self._nothing_to_start:
                return True
        return False

    def _following(self) -> _Line | None:
        """The line that a task computes after it has ended another; None if there is none now."""
        if self._executor.room <= 0 or self._failure is not None or self.stopping:
            return None
        for _ in range(_LINES_IN_A_ROW):
            line = self._next()
            if line is not None or self._nothing_to_start:
                return line
        return None

    def _next(self) -> _Line | None:
        """The next line, if it is to be computed. An error that ends the run is noted, not raised."""
        self._nothing_to_start = False
        try:
            if self._returned:
                return self._returned.popleft()
            may_read = not self._exhausted and not (self._identical is not None and self._identical.full)
            reads = may_read and not (self._order is not None and self._order.full)
            line = self._read() if reads else None
            self._end_if_spent()
            if self._order is not None:
                if line is not None:
                    self._order.add(line)
                    if self._order.reads_ahead and not self._exhausted and (further := self._read()) is not None:
                        self._order.add(further)
                line = self._order.take(self._clock.now(), more=may_read and not self._exhausted)
            if line is not None:
                self._count(line)
                self._expect(line)
            self._nothing_to_start = line is None and not reads
            return line
        except Exception as error:
            self._stop(error)
        return None

    def _read(self) -> _Line | None:
        """Read a record, and return its line if it is to be computed."""
        record = next(self._records, None)
        if record is None:
            self._job.check_unchanged()
            self._exhausted = True
            return None
        if record.number in self._job.finished:
            return None
        parsed = self._job.parser.parse(record)
        custom_id, duplicate = self._job.ids.assign(parsed.number, parsed.custom_id)
        if isinstance(parsed, BadLine) or duplicate is not None:
            self.tally.lines_read += 1
            self.tally.weight_read += record.weight
            error = parsed.error if isinstance(parsed, BadLine) else duplicate
            assert error is not None
            self._fail(parsed.number, custom_id, error)
            return None
        line = _Line(parsed.number, custom_id, parsed.endpoint, parsed.body, record.weight, _size(record, parsed))
        if self._identical is not None:
            if (answer := self._identical.answer_for(line.number)) is not None:
                self._share(line, answer)
                return None
            asked = self._identical.asked_like(line.number)
            if asked is not None and asked.body == line.body:
                # Bodies that are equal in all fields need not be held twice while one waits for the other.
                line = line._replace(body=asked.body)
            held = _BYTES_OF_LINE + (0 if asked is not None and asked.body is line.body else line.size)
            if not self._identical.take_up(line.number, line, held):
                return None
        return line

    def _count(self, line: _Line) -> None:
        """Count a line that is taken up."""
        self.tally.lines_read += 1
        self.tally.weight_read += line.weight

    def _expect(self, line: _Line) -> None:
        expected = None if self._order is None else self._order.expected_tokens(line)
        if expected is None:
            expected = self._expected_tokens(answer_limit(line.body, self._limit))
        if expected is not None:
            self._expected[line.number] = expected

    def _share(self, line: _Line, answer: Mapping[str, Any]) -> None:
        """Write the answer to an identical line as that of `line`."""
        self._count(line)
        self._sink.write(encode_answer(self._job.key, line.number, line.custom_id, answer) + b"\n")
        self.tally.deduplicate(answer)

    def _call(self, line: _Line, pauses: Callable[[Exception | None], None]) -> Call:
        call_id = request_id(self._job.key, line.number)
        return Call(line.endpoint, line.body, call_id, "batch", pauses=pauses, defaults=self._defaults)

    def _done(self, line: _Line, outcome: Outcome) -> None:
        self._moved.set()
        if self._order is not None:
            self._order.ended(line, outcome if isinstance(outcome, dict) else None)
        if self._failure is not None:
            # Half a line may stand at the end of the output: it is repaired on resume, if nothing comes after it.
            return
        try:
            if isinstance(outcome, dict):
                self._succeed(line, outcome)
            elif isinstance(outcome, EndpointDown):
                self._returned.append(line)
            elif isinstance(outcome, BudgetExhausted):
                self._end_for(outcome)
            elif isinstance(outcome, EndpointError) and outcome.is_out_of_quota:
                self._end_for(_out_of_quota(outcome))
            elif (failure := self._failure_of_run(line, outcome)) is not None:
                self._stop(failure)
            elif outcome is not None:
                self._fail_line(line, outcome)
        except Exception as error:
            self._stop(error)

    def _fail_line(self, line: _Line, error: Exception) -> None:
        if self._invalid is not None and isinstance(error, ContextLengthExceeded):
            body = self._invalid.filling(line.number, line.endpoint)
            if body is not None:
                self._returned.append(line._replace(body=body))
                return
        self._expected.pop(line.number, None)
        if self._invalid is not None and (answer := self._invalid.latest(line.number)) is not None:
            self._write_answer(line, answer)  # it was asked for more than it can have
            return
        for other in () if self._identical is None else self._identical.failed(line.number):
            self._count(other)
            self._returned.append(other)
        if self._common is not None and self._common.is_that_of(line.body, error):
            self._held_back.append((line, error))
            if self._common.is_enough:
                self._stop(self._common.error)
            return
        self._let_fail()
        self._fail(line.number, line.custom_id, error)

    def _let_fail(self) -> None:
        """Write what was held back: the lines fail by themselves."""
        held, self._held_back = self._held_back, []
        for line, error in held:
            self._fail(line.number, line.custom_id, error)

    def _failure_of_run(self, line: _Line, outcome: Exception | None) -> BaseException | None:
        """Return the error with which the run ends because of how `line` ended; None: it concerns this line alone."""
        if outcome is None:
            cancelled = f"line {line.number} was cancelled while it was computed: run the command again"
            return None if self.stopping else RunFailed(cancelled)
        if isinstance(outcome, RunFailed):
            return outcome
        if nobody_computes(outcome):
            return outcome.__cause__ or outcome
        if isinstance(outcome, EndpointError) and self._is_refused_key(outcome):
            again = (
                "with a key that it accepts" if outcome.status == 401 else "with another key, or when that has changed"
            )
            return RunFailed(f"{outcome}. Finished lines are kept: run the same command again {again}")
        if isinstance(outcome, EndpointError) and outcome.is_wrong_address and not self.tally.succeeded:
            return RunFailed(str(outcome))
        return None

    def _succeed(self, line: _Line, answer: dict[str, Any]) -> None:
        self.tally.count_tokens(answer)
        if self._invalid is not None:
            body = self._invalid.again(line.number, line.endpoint, line.body, answer)
            if body is not None:
                self.tally.asked_again += 1
                self._asked_again[line.number] = line
                self._returned.append(line._replace(body=body))
                return
        self._write_answer(line, answer)

    def _write_answer(self, line: _Line, answer: dict[str, Any]) -> None:
        if self._invalid is not None:
            self._asked_again.pop(line.number, None)
            answer = self._invalid.settled(line.number, answer)
            self.tally.invalid_answers += marked_invalid(answer)
        if self._cost_of is not None:
            answer = _with_cost(answer, self._cost_of(request_id(self._job.key, line.number)))
        result = encode_answer(self._job.key, line.number, line.custom_id, answer) + b"\n"
        if self._common is not None:
            self._common.end()
            self._let_fail()
        offset = self._sink.size
        self._sink.write(result)
        is_natural = not goes_on_to_its_limit(line.body, self._defaults)
        self.tally.succeed(answer, answer_limit(line.body, self._limit), is_natural=is_natural)
        if (expected := self._expected.pop(line.number, None)) is not None:
            self.tally.lengths.add(expected, answer)
        if self._identical is not None:
            for other in self._identical.answered(line.number, result, offset):
                self._share(other, deduplicated(answer))

    def _is_refused_key(self, error: EndpointError) -> bool:
        """Whether the error concerns every line. Once lines succeeded, a 403 is about the content of one line."""
        if error.is_no_such_model:
            return False
        return error.status == 401 or (error.status == 403 and not self.tally.succeeded)

    def _end_for(self, error: Exception) -> None:
        """End the run with `error` as soon as the lines under way, and those already paid for, have ended."""
        self._exhaustion = self._exhaustion or error
        self._end_if_spent()

    def _end_if_spent(self) -> None:
        if self._exhaustion is None or self.stopping:
            return
        # What is in a batch is paid for. If it were not waited for here, no run with this budget would get it.
        waits = isinstance(self._exhaustion, BudgetExhausted)
        if waits and self._waits_for_batches() and not self._exhausted:
            return
        self.stopping = True
        send_no_more(self._inference)
        self._executor.try_no_more(besides=InABatch if waits else None)

    def _stop(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._moved.set()

    def _fail(self, number: int, custom_id: str, error: Exception) -> None:
        again = passing(error) or is_timeout(error)
        failure = {**line_error(error), "line": number, RETRYABLE: again}
        self._sink.write(encode_failure(self._job.key, number, custom_id, failure) + b"\n")
        self.tally.failed += 1
        self.tally.failures.add(number, custom_id, failure)


def _out_of_quota(error: EndpointError) -> RunFailed:
    return RunFailed(
        f"{error}. Nothing more is computed for this key: finished lines are kept, and the same command goes on once "
        "that has changed"
    )


def _size(record: Record, line: Line) -> int:
    # A row may be far shorter than the prompt that a template makes of it.
    return len(record.content) if isinstance(record.content, bytes) else len(str(line.body))


def _with_cost(answer: dict[str, Any], dollars: float | None) -> dict[str, Any]:
    """Return an answer whose `usage` says what it cost in `dollars`, if that is known."""
    usage = answer.get("usage")
    return answer if dollars is None or not isinstance(usage, dict) else {**answer, "usage": {**usage, "cost": dollars}}
