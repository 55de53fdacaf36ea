"""The lines that a worker holds: claimed, being computed, or with a result that is not committed yet."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from batchwright.lines.line_executor import LineExecutor
from batchwright.store.records import ClaimedLine, LineResult

_MOST_RESULTS = 8192
_MOST_RESULT_BYTES = 64 * 2**20
_COMMIT_LINES = 2048
_COMMIT_BYTES = 16 * 2**20


class ClaimedLines:
    """The held lines, from claim to commit. It does no I/O."""

    def __init__(self, calls: LineExecutor[tuple[ClaimedLine, bytes]]) -> None:
        """`calls` computes the lines, and reports to `end` each one that ended."""
        self.calls = calls
        self.waiting_bytes = 0
        """Number of bytes of the waiting lines."""
        self.waiting: deque[tuple[ClaimedLine, bytes]] = deque()
        self._results: deque[LineResult] = deque()
        self._result_bytes = 0
        self._returned: list[ClaimedLine] = []
        self._held: Counter[str] = Counter()

    @property
    def batches(self) -> Collection[str]:
        """Batches of which it holds lines."""
        return self._held.keys()

    @property
    def empty(self) -> bool:
        return not self._held

    @property
    def congested(self) -> bool:
        """Whether so many results wait for the store that nothing more is to be computed."""
        return len(self._results) >= _MOST_RESULTS or self._result_bytes >= _MOST_RESULT_BYTES

    def take(self, lines: Iterable[tuple[ClaimedLine, bytes]]) -> None:
        """Hold claimed lines, with their bytes, until there is a slot for them."""
        for line, content in lines:
            self._held[line.batch_id] += 1
            self.waiting.append((line, content))
            self.waiting_bytes += line.length

    def next(self) -> tuple[ClaimedLine, bytes] | None:
        """Return a line to be computed now, with its bytes."""
        if not self.waiting or self.congested:
            return None
        item = self.waiting.popleft()
        self.waiting_bytes -= item[0].length
        return item

    def end(self, line: ClaimedLine, result: LineResult | None) -> None:
        """Note that a line ended: with a result, or to be given back."""
        if result is None:
            self._returned.append(line)
        else:
            self._results.append(result)
            self._result_bytes += len(result.output)

    def give_back_waiting(self) -> None:
        """Give lines that were not started back to the store."""
        self._returned += [line for line, _ in self.waiting]
        self.waiting.clear()
        self.waiting_bytes = 0

    def give_back_last(self, count: int) -> None:
        """Give back `count` of the lines that were not started, those that would be started last."""
        for _ in range(min(count, len(self.waiting))):
            line, _ = self.waiting.pop()
            self.waiting_bytes -= line.length
            self._returned.append(line)

    def give_back_running(self) -> None:
        """Give lines that are being computed back to the store."""
        self._returned += [line for line, _ in self.calls.drop(lambda item: False)]

    def give_back(self, lines: Iterable[ClaimedLine]) -> None:
        """Give claimed lines back that were never held."""
        for line in lines:
            self._held[line.batch_id] += 1
            self._returned.append(line)

    def end_at_once(self, lines: Iterable[tuple[ClaimedLine, LineResult]]) -> None:
        """Note results of claimed lines that were never held."""
        for line, result in lines:
            self._held[line.batch_id] += 1
            self.end(line, result)

    def gather_results(self) -> list[LineResult]:
        """Return what to commit next. It stays held until `release`, and can be put back."""
        results: list[LineResult] = []
        size = 0
        while self._results and len(results) < _COMMIT_LINES and size < _COMMIT_BYTES:
            result = self._results.popleft()
            size += len(result.output)
            results.append(result)
        self._result_bytes -= size
        return results

    def put_back(self, results: Sequence[LineResult]) -> None:
        """Take back results that could not be committed now."""
        self._results.extendleft(reversed(results))
        self._result_bytes += sum(len(result.output) for result in results)

    def returned(self) -> list[ClaimedLine]:
        """Return what to give back next. It stays held until `release_returned`."""
        return [*self._returned]

    def release(self, lines: Iterable[LineResult | ClaimedLine]) -> bool:
        """Forget results that the store knows. Returns whether nothing is held any more of some batch."""
        before = len(self._held)
        self._held -= Counter(line.batch_id for line in lines)
        return len(self._held) < before

    def release_returned(self, lines: Sequence[ClaimedLine]) -> None:
        """Forget lines that the store has back: the first of `returned`."""
        del self._returned[: len(lines)]
        self.release(lines)

    def drop(self, batch_ids: Collection[str]) -> int:
        """Forget the lines of batches that have an ending; how many. Results on their way are refused by the store."""
        dropped = [line for line, _ in self.waiting if line.batch_id in batch_ids]
        self.waiting = deque((line, content) for line, content in self.waiting if line.batch_id not in batch_ids)
        self.waiting_bytes = sum(line.length for line, _ in self.waiting)
        dropped += [line for line, _ in self.calls.drop(lambda item: item[0].batch_id not in batch_ids)]
        self.release(dropped)
        return len(dropped)

    def clear(self) -> None:
        """Forget everything: the lease is lost."""
        self.waiting.clear()
        self.waiting_bytes = 0
        self.calls.drop(lambda item: False)
        self._results.clear()
        self._result_bytes = 0
        self._returned.clear()
        self._held.clear()
