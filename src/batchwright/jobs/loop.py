"""The loop of a job: lines in, steps of the executor, results out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from batchwright.errors import BatchwrightError, EngineClosed, InvalidRequest
from batchwright.jobs.executor import Executor
from batchwright.jobs.job import Job
from batchwright.jobs.lines import BadLine, Line
from batchwright.jobs.results import ResultEncoder
from batchwright.jobs.sink import Sink
from batchwright.jobs.sources import Record
from batchwright.request import InferenceResponse

_LINES_BETWEEN_STEPS = 512
"""So that a long run of bad or finished lines does not keep running sequences waiting."""


@dataclass(slots=True)
class Tally:
    """What this run has done so far."""

    succeeded: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class _Pending:
    """A line whose prompts are with the executor."""

    line: Line
    custom_id: str
    open: int
    """Prompts that have no response yet."""
    responses: list[InferenceResponse | None]
    error: BatchwrightError | None = None


@dataclass
class JobLoop:
    """Carries the lines of one job through one executor. Holds only the lines that are with the executor."""

    job: Job
    executor: Executor
    sink: Sink
    on_step: Callable[[], None] = lambda: None
    """Called between steps."""
    tally: Tally = field(default_factory=Tally)
    unix_time: Callable[[], float] = time.time
    """Seconds since 1970, for `created` in the results."""
    _pending: dict[str, tuple[_Pending, int]] = field(default_factory=dict)
    _exhausted: bool = False

    def run(self) -> None:
        """Until every line is finished.

        What is written stays written, and the executor holds none of this job's requests, whatever is raised.
        """
        self._encoder = ResultEncoder(self.job.key, self.executor.model_name, self.unix_time)
        try:
            self._run(self.job.source.records())
        finally:
            self._withdraw()

    def _run(self, records: Iterator[Record]) -> None:
        while not self._exhausted or self._pending:
            self._feed(records)
            if self.executor.unfinished:
                for response in self.executor.step():
                    self._take(response)
            self.on_step()

    def _withdraw(self) -> None:
        """Cancel what was submitted and is not answered: nothing, when every line is finished."""
        # A closed executor has let go of everything; what closed it is the error to be seen.
        with suppress(EngineClosed):
            while self._pending:
                self.executor.cancel(self._pending.popitem()[0])

    def _feed(self, records: Iterator[Record]) -> None:
        for _ in range(_LINES_BETWEEN_STEPS):
            if self._exhausted or (self.executor.unfinished and self.executor.wants <= 0):
                return
            record = next(records, None)
            if record is None:
                self.job.check_unchanged()
                self._exhausted = True
            elif record.number not in self.job.finished:
                self._start(self.job.parser.parse(record))

    def _start(self, line: Line | BadLine) -> None:
        custom_id, duplicate = self.job.ids.assign(line.number, line.custom_id)
        if isinstance(line, BadLine):
            self._fail(line.number, custom_id, line.error)
        elif duplicate is not None:
            self._fail(line.number, custom_id, duplicate)
        else:
            self._submit(line, custom_id)

    def _submit(self, line: Line, custom_id: str) -> None:
        count = len(line.prompts)
        pending = _Pending(line, custom_id, count, [None] * count)
        try:
            requests = [line.request(index, f"{self.job.key}-{line.number}-{index}") for index in range(count)]
        except InvalidRequest as error:
            self._fail(line.number, custom_id, error)
            return
        for index, request in enumerate(requests):
            self._pending[request.request_id] = (pending, index)
            try:
                self.executor.submit(request)
            except InvalidRequest as error:
                del self._pending[request.request_id]
                pending.error = error
                # Those before it are with the executor and end there; those after it need not begin.
                pending.open -= count - index
                break
        if not pending.open:
            self._finish(pending)

    def _take(self, response: InferenceResponse) -> None:
        if response.request_id not in self._pending:
            # Of a request that the owner of the executor submitted, or that was withdrawn.
            return
        pending, index = self._pending.pop(response.request_id)
        pending.responses[index] = response
        pending.open -= 1
        pending.error = pending.error or response.error
        self.tally.prompt_tokens += response.usage.prompt_tokens
        self.tally.generated_tokens += response.usage.completion_tokens
        if not pending.open:
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        line = pending.line
        if pending.error is not None:
            self._fail(line.number, pending.custom_id, pending.error)
            return
        responses = [response for response in pending.responses if response is not None]
        self.sink.write(self._encoder.success(line, pending.custom_id, responses))
        self.tally.succeeded += 1

    def _fail(self, number: int, custom_id: str, error: BatchwrightError) -> None:
        self.sink.write(self._encoder.failure(number, custom_id, error))
        self.tally.failed += 1
