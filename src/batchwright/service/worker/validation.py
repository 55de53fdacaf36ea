"""Validation of a batch's input: all lines are checked and added to the store, or the batch is rejected with reasons.

The file is read twice as a stream, to count its lines and to check them, in threads and piece by piece, so that memory
is bounded and the event loop is not blocked. Lines are put in order within windows, each of which is added when it
is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from batchwright.errors import InvalidRequest, NotFound, shown
from batchwright.lines.batch_line import BatchLine, check_batch_line, decode_line, line_too_long, split_lines
from batchwright.lines.custom_ids import IdTable, duplicate_id
from batchwright.service.files.blobs import Blobs
from batchwright.service.limits import ServiceLimits
from batchwright.service.off_loop import off_loop
from batchwright.service.worker.line_positions import LinePositions
from batchwright.store.records import BatchProblem, BatchRecord, NewLine
from batchwright.store.store import Store

MAX_PROBLEMS = 100
_ADDED_LINES = 4000
"""Number of lines added in one transaction."""
_PIECE_LINES = 500
"""Most lines that a thread checks in one go, since it holds the interpreter meanwhile."""
_PIECE_BYTES = 2**20
_READ_BYTES = 2**20


async def validate(
    store: Store, blobs: Blobs, worker: str, batch: BatchRecord, limits: ServiceLimits, *, places: int
) -> bool:
    """Move `batch` from validating to in progress or failed. Returns False if it is not this worker's any more.

    `places`: about how many of its lines are going to be computed at once.

    Raises what the store raises, and `OSError` when no file can be read; the batch is then validated again from the
    start. Raises `InputBroken` when this one alone cannot.
    """
    blaming = blobs.blaming(batch.input_file_id)
    try:
        file = await off_loop(blaming(blobs.open), batch.input_file_id)
    except NotFound as error:
        return await store.reject(worker, batch.id, [BatchProblem("file_not_found", str(error), "input_file_id")])
    with file:
        positions = LinePositions(places)
        check = LineCheck(file, batch.endpoint, limits, positions)
        await off_loop(blaming(check.count))
        is_going = True
        while is_going:
            is_going = await off_loop(blaming(check.check_piece))
            # The lines of a batch that will be rejected are not needed.
            if check.problems or (is_going and not positions.full):
                continue
            window = await off_loop(partial(positions.window, more=is_going))
            for start in range(0, len(window), _ADDED_LINES):
                if not await store.add_lines(worker, batch.id, window[start : start + _ADDED_LINES]):
                    return False
    if check.problems:
        return await store.reject(worker, batch.id, check.problems)
    return await store.begin(worker, batch.id, total=check.total, model=check.model, shared=positions.shared)


class LineCheck:
    """Check of one input file, whose valid lines are given to `positions`. Its methods block."""

    def __init__(self, file: BinaryIO, endpoint: str, limits: ServiceLimits, positions: LinePositions) -> None:
        self._file = file
        self._endpoint = endpoint
        self._limits = limits
        self._positions = positions
        self._ids = IdTable(0)
        self._lines: Iterator[tuple[int, int, bytes | None]] = iter(())
        self._ended = False
        self.problems: list[BatchProblem] = []
        """Problems found, at most `MAX_PROBLEMS`."""
        self.total = 0
        """Number of lines so far that are not blank."""
        self.model: str | None = None

    def count(self) -> None:
        """Count the lines, so that the number of ids is known before the first line is checked."""
        newlines = 0
        while content := self._file.read(_READ_BYTES):
            newlines += content.count(b"\n")
        self._file.seek(0)
        self._ids = IdTable(min(newlines + 1, self._limits.max_lines))
        self._lines = split_lines(self._file, self._limits.max_line_bytes)

    def check_piece(self) -> bool:
        """Check some more lines. Returns False at the end of the file, or after too many problems."""
        count = size = 0
        for number, offset, content in self._lines:
            if content is None:
                self._blame(line_too_long(self._limits.max_line_bytes), number)
            elif content and not content.isspace():
                count, size = count + 1, size + len(content)
                self._take(number, offset, content)
            if self._ended:
                return False
            if count >= _PIECE_LINES or size >= _PIECE_BYTES or (self._positions.full and not self.problems):
                return True
        self._ended = True
        if not self.total and not self.problems:
            self.problems.append(BatchProblem("empty_file", "The input file has no lines.", "input_file_id"))
        return False

    def _take(self, number: int, offset: int, content: bytes) -> None:
        self.total += 1
        if self.total > self._limits.max_lines:
            message = f"The input file has more than {self._limits.max_lines:,} lines: split it."
            self.problems.append(BatchProblem("too_many_lines", message))
            self._ended = True
            return
        try:
            line = check_batch_line(decode_line(content))
            self._check_batch(line)
            holder = self._ids.claim(line.custom_id, number)
            if holder is not None:
                raise duplicate_id(holder)
        except InvalidRequest as error:
            self._blame(error, number)
            return
        self.model = self.model or line.model
        if not self.problems:
            self._positions.add(NewLine(number, line.custom_id, offset, len(content)), line.endpoint, line.body)

    def _check_batch(self, line: BatchLine) -> None:
        """Raise `InvalidRequest` for a valid line that does not fit its batch."""
        if line.endpoint != self._endpoint:
            raise InvalidRequest(
                f"url is {shown(line.endpoint)}: it must be the endpoint of the batch, {self._endpoint!r}.",
                param="url",
                code="invalid_url",
            )
        if None not in (line.model, self.model) and line.model != self.model:
            raise InvalidRequest(
                f"model is {shown(line.model)}, before it was {shown(self.model)}: all lines of a batch must have the "
                "same.",
                param="body.model",
                code="mismatched_model",
            )

    def _blame(self, error: InvalidRequest, line: int) -> None:
        self.problems.append(BatchProblem(error.code, str(error), error.param, line))
        self._ended = len(self.problems) >= MAX_PROBLEMS
