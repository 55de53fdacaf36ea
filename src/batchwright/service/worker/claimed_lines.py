"""The lines that a worker claims: how many, their bytes and calls, and holding them until results are committed."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from batchwright.decayed_rate import DecayedRate
from batchwright.errors import InputBroken, InvalidRequest, NotFound
from batchwright.inference.inference import Call
from batchwright.lines.batch_line import decode_line, request_id
from batchwright.lines.line_executor import LineExecutor
from batchwright.request import Flow
from batchwright.service.access.api_keys import bounded_priority
from batchwright.service.files.blobs import Blobs, Span
from batchwright.service.worker.copies import Copies, Copy, Item, result_of_copy
from batchwright.service.worker.output_lines import key_of
from batchwright.store.records import ClaimedLine, LineResult

LOOKAHEAD = 1.0
"""Seconds of work kept waiting in memory, so that no slot is empty during the next claim."""
_MEMORY = 5.0
"""Seconds over which the rate of lines is averaged."""
_TOO_MANY = 2.0 * LOOKAHEAD
"""Seconds of waiting work that are too much; if it stays so for as many seconds, lines are given back."""


class ClaimPlan:
    """Plan that keeps as many lines ready as end in `LOOKAHEAD` seconds at the current rate.

    A fast model then needs few transactions of the store, and a slow one holds no lines that others could compute.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._ended = DecayedRate(_MEMORY)
        self._ready = 0
        self._too_many_since: float | None = None

    def ended(self) -> None:
        """Note that a line was computed."""
        self._ended.add()

    def low(self, waiting: int) -> bool:
        """Return whether to call `wanted`, with `waiting` lines claimed and not started."""
        return waiting <= self._ready // 2

    def wanted(self, now: float, *, room: int, waiting: int) -> int:
        """Return how many lines to claim: `room` more can be started, `waiting` are claimed and not started."""
        elapsed = max(0.0, now - self._since)
        self._since = now
        # Bounded, since after hours without a call the rate would be near 0 for most of a minute.
        self._ended.elapse(min(elapsed, _MEMORY))
        # The first second says little, so the rate is computed as if it had passed.
        self._ready = int(LOOKAHEAD * self._ended.events / max(1.0, self._ended.seconds))
        return max(0, room + self._ready - waiting) if self.low(waiting) else 0

    def excess(self, now: float, *, waiting: int) -> int:
        """Return how many of `waiting` lines to give back because the model has become slower. Call after `wanted`.

        They would delay lines that are claimed after them, such as those of another tenant.
        """
        if waiting * LOOKAHEAD <= self._ready * _TOO_MANY:
            self._too_many_since = None
        elif self._too_many_since is None:
            self._too_many_since = now
        elif now - self._too_many_since >= _TOO_MANY:
            self._too_many_since = None
            return waiting - self._ready
        return 0


_log = logging.getLogger(__name__)
_MOST_RESULTS = 8192
_MOST_RESULT_BYTES = 64 * 2**20
_COMMIT_LINES = 2048
_COMMIT_BYTES = 16 * 2**20


async def read_contents(blobs: Blobs, lines: Sequence[ClaimedLine]) -> list[Item]:
    """Return each line with its bytes in the input; no bytes for one that cannot be read, which then fails.

    Raises `OSError` when others may not be readable either.
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for place, line in enumerate(lines):
        places[line.input_file_id].append(place)
    found = [b""] * len(lines)
    for file_id, members in places.items():
        spans = [(lines[place].offset, lines[place].length) for place in members]
        try:
            contents = await blobs.read_spans(file_id, spans)
        except NotFound as error:
            _log.error("%s: %s", lines[members[0]].batch_id, error)
            continue
        except InputBroken as error:
            _log.error("%s: %s", lines[members[0]].batch_id, error)
            # One bad place of a disk must not fail the lines that lie elsewhere in the file.
            contents = [await _content_alone(blobs, file_id, span) for span in spans]
        for place, content in zip(members, contents, strict=True):
            found[place] = content
    return [*zip(lines, found, strict=True)]


async def _content_alone(blobs: Blobs, file_id: str, span: Span) -> bytes:
    """Return the bytes of one span; none if it cannot be read."""
    try:
        [content] = await blobs.read_spans(file_id, [span])
    except (NotFound, InputBroken):
        return b""
    return content


def call_of(item: Item, pauses: Callable[[Exception | None], None], *, timeout: float | None) -> Call:
    """Return the call that computes a line. `timeout`: seconds for one try. Raises `InputBroken`."""
    line, content = item
    try:
        body = decode_line(content)["body"]
    except (InvalidRequest, KeyError) as error:
        raise InputBroken(f"The line was not found where it was validated: {error}.") from error
    return Call(
        line.endpoint,
        bounded_priority(body, line.best_priority),
        request_id(key_of(line.batch_id), line.number),
        "batch",
        timeout,
        pauses,
        # All lines of a tenant have one share; between its batches, claims decide by their completion windows.
        flow=Flow(line.tenant, "lines"),
    )


class ClaimedLines:
    """Lines held from claim to commit. It does no I/O."""

    def __init__(self, calls: LineExecutor[Item], copies: Copies) -> None:
        """`calls` computes the lines, and reports each one that ended to `end`; `copies` are not computed."""
        self.calls = calls
        self.copies = copies
        self.waiting_bytes = 0
        """Number of bytes of the waiting lines, without copies."""
        self._starts_none = False
        self.waiting: deque[Item] = deque()
        self._results: deque[LineResult | Copy] = deque()
        """Results, and copies, whose results are made when they are committed."""
        self._result_bytes = 0
        self._shared: dict[bytes, tuple[bytes, int]] = {}
        """By output: the one object that copies among the results hold of it, and their number."""
        self._returned: list[ClaimedLine] = []
        self._held: Counter[str] = Counter()

    @property
    def batches(self) -> Collection[str]:
        """Batches that have held lines."""
        return self._held.keys()

    @property
    def empty(self) -> bool:
        return not self._held

    @property
    def congested(self) -> bool:
        """Whether so many results wait to be committed that no more lines should be computed."""
        return len(self._results) >= _MOST_RESULTS or self._result_bytes >= _MOST_RESULT_BYTES

    def take(self, items: Iterable[Item]) -> None:
        """Hold claimed lines until there is a slot for them, or an answer to one with the same request."""
        for line, content in items:
            self._held[line.batch_id] += 1
            taken = self.copies.take_up((line, content))
            if isinstance(taken, bytes):
                self._add_copy(line, taken)
            elif taken:
                self.waiting.append((line, content))
                self.waiting_bytes += line.length

    def next(self) -> Item | None:
        """Return the next line to compute; None: there is none, or too many results wait."""
        if not self.waiting or self.congested:
            return None
        item = self.waiting.popleft()
        self.waiting_bytes -= item[0].length
        return item

    def end(self, line: ClaimedLine, result: LineResult | None) -> None:
        """Note that a line ended, and what becomes of its copies; without a result it is given back."""
        if result is None:
            self._give_back_one(line)
            return
        self._add(result)
        if result.succeeded:
            for other in self.copies.answered(line, result.output):
                self._add_copy(other, result.output)
            return
        for other, content in self.copies.failed(line):
            if self._starts_none:
                self._give_back_one(other)
            else:
                self.waiting.appendleft((other, content))
                self.waiting_bytes += other.length

    def _add(self, result: LineResult) -> None:
        self._results.append(result)
        self._result_bytes += len(result.output)

    def _add_copy(self, line: ClaimedLine, output: bytes) -> None:
        # Each claim reads the answer from the store anew, as an object of its own.
        kept, count = self._shared.get(output, (output, 0))
        self._shared[kept] = kept, count + 1
        self._results.append((line, kept))
        if not count:
            self._result_bytes += len(kept)

    def _give_back_one(self, line: ClaimedLine) -> None:
        self._returned += [line, *self.copies.given_up(line)]

    def give_back_waiting(self) -> None:
        """Give all lines that were not started back to the store, now and from now on."""
        self._starts_none = True
        self.give_back_last(len(self.waiting))

    def give_back_last(self, count: int) -> None:
        """Give back the `count` waiting lines that would be started last."""
        for _ in range(min(count, len(self.waiting))):
            line, _ = self.waiting.pop()
            self.waiting_bytes -= line.length
            self._give_back_one(line)

    def give_back_running(self) -> None:
        """Give lines that are being computed back to the store."""
        for line, _ in self.calls.drop(lambda item: False):
            self._give_back_one(line)

    def give_back(self, lines: Iterable[ClaimedLine]) -> None:
        """Give back claimed lines that were not held yet."""
        for line in lines:
            self._held[line.batch_id] += 1
            self._returned.append(line)

    def end_at_once(self, results: Iterable[LineResult]) -> None:
        """Note results of claimed lines that were not held yet."""
        for result in results:
            self._held[result.batch_id] += 1
            self._add(result)

    def answer_at_once(self, copies: Iterable[Copy]) -> None:
        """Note claimed copies that were not held yet."""
        for line, output in copies:
            self._held[line.batch_id] += 1
            self._add_copy(line, output)

    def gather_results(self) -> list[LineResult]:
        """Return the results to commit next. Their lines are held until `release`, and they can be put back."""
        results: list[LineResult] = []
        size = 0
        while self._results and len(results) < _COMMIT_LINES and size < _COMMIT_BYTES:
            result = self._next_result()
            size += len(result.output)
            results.append(result)
        return results

    def _next_result(self) -> LineResult:
        first = self._results.popleft()
        if isinstance(first, LineResult):
            self._result_bytes -= len(first.output)
            return first
        line, output = first
        kept, count = self._shared.pop(output)
        if count > 1:
            self._shared[kept] = kept, count - 1
        else:
            self._result_bytes -= len(kept)
        return result_of_copy(line, output)

    def put_back(self, results: Sequence[LineResult]) -> None:
        """Put back results that could not be committed now, so that they come first again."""
        self._results.extendleft(reversed(results))
        self._result_bytes += sum(len(result.output) for result in results)

    def returned(self) -> list[ClaimedLine]:
        """Return the lines to give back next. They are held until `release_returned`."""
        return [*self._returned]

    def release(self, lines: Iterable[LineResult | ClaimedLine]) -> bool:
        """Forget lines whose results the store has. Returns whether some batch has no held lines any more."""
        before = len(self._held)
        self._held -= Counter(line.batch_id for line in lines)
        return len(self._held) < before

    def release_returned(self, lines: Sequence[ClaimedLine]) -> None:
        """Forget lines that were given back to the store: the first of `returned`."""
        del self._returned[: len(lines)]
        self.release(lines)

    def drop(self, batch_ids: Collection[str]) -> int:
        """Give back the lines of batches that have an ending, and return their number. No results are taken of them.

        If they stayed claimed until the files of their batch are built, they would count as being computed: for their
        tenant, which would get fewer others, and as suspects if this process died.
        """
        dropped = [line for line, _ in self.waiting if line.batch_id in batch_ids]
        self.waiting = deque((line, content) for line, content in self.waiting if line.batch_id not in batch_ids)
        self.waiting_bytes = sum(line.length for line, _ in self.waiting)
        dropped += self.copies.forget(batch_ids)
        dropped += [line for line, _ in self.calls.drop(lambda item: item[0].batch_id not in batch_ids)]
        self._returned += dropped
        return len(dropped)

    def clear(self) -> None:
        """Forget everything, because the lease is lost."""
        self.waiting.clear()
        self.waiting_bytes = 0
        self.copies.clear()
        self.calls.drop(lambda item: False)
        self._results.clear()
        self._result_bytes = 0
        self._shared.clear()
        self._returned.clear()
        self._held.clear()
