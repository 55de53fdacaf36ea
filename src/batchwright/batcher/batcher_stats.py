"""The statistics of a batcher, which answer "why didn't it batch?"."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from batchwright.histograms import Histogram
from batchwright.policies import Item, Reason
from batchwright.policies.policy import are_alike
from batchwright.priority_levels import PriorityLevels

_RECENT = 100
_WHY: dict[str, str] = {
    Reason.FULL: "nothing more would have fitted",
    Reason.IDLE: "the model was free, and nothing is held back from a free model",
    Reason.MAX_WAIT: "the oldest had waited as long as it may",
    Reason.WINDOW: "the window had ended",
    Reason.DEADLINE: "a deadline would have been missed by waiting longer",
    Reason.DRAIN: "the batcher was closing",
    Reason.RETRY: "parts of batches that failed, to find the request that is to blame",
}


@dataclass(slots=True)
class BatcherStats:
    """Statistics since the batcher was created. Requests are counted once, where they end; times are milliseconds."""

    waiting: int = 0
    """Requests in the queue now."""
    running: int = 0
    """Requests in the model now, or to be computed again because their batch failed."""
    requests: int = 0
    """Requests taken into the queue."""
    with_deadline: int = 0
    """Requests among them that had a deadline."""
    succeeded: int = 0
    failed: int = 0
    """Requests answered with an error of the model or the engine, or because the batcher was closed."""
    expired: int = 0
    """Requests whose deadline passed while they waited or were computed."""
    cancelled: int = 0
    """Requests whose callers cancelled them or are gone."""
    overloaded: int = 0
    """Requests not taken because the queue was full."""
    refused: int = 0
    """Requests not taken because they were certain to miss their deadline."""
    too_large: int = 0
    """Requests not taken because no batch can hold them."""
    batches: int = 0
    """Batches dispatched."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Batches by the reason for which they were dispatched."""
    items_by_reason: dict[str, int] = field(default_factory=dict)
    """Requests in the batches of each reason."""
    splits: int = 0
    """Batches that failed and were computed again in parts."""
    out_of_memory: int = 0
    """Batches, and parts of them, for which memory ran out."""
    is_model_down: bool = False
    """Whether the model fails every request: then one request of each batch is tried, and the others fail with it."""
    memory_limit_mb: float | None = None
    """Memory that a batch may take now, in MB, if the policy limits it."""
    items: int = 0
    """Requests in dispatched batches."""
    tokens: int = 0
    """Lengths of the requests that the model computed, without padding or requests for which it returned an error."""
    cells: int = 0
    """Lengths with padding: for each batch, its longest request times its number of requests."""
    generated_tokens: int = 0
    """Generated tokens, by the model's tokenizer; 0 if it has none."""
    model_seconds: float = 0.0
    """Seconds in the model, for batches that succeeded."""
    queue_ms: Histogram = field(default_factory=Histogram)
    """Time from submission to dispatch, of dispatched requests."""
    model_ms: Histogram = field(default_factory=Histogram)
    """Time of a batch in the model."""
    recent_model_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Time in the model of each of the last hundred batches, the latest last."""
    levels: PriorityLevels = field(default_factory=PriorityLevels)
    """Latency, share answered in time and refusals by priority: `levels[0].latency_ms.percentile(99)`."""

    @property
    def latency_ms(self) -> Histogram:
        """Time from submission to the answer, of requests that succeeded."""
        return Histogram.merged(level.latency_ms for level in self.levels.copy().values())

    def count_batch(self, reason: str, size: int) -> None:
        """Count a dispatched batch of `size` requests."""
        self.batches += 1
        self.items += size
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.items_by_reason[reason] = self.items_by_reason.get(reason, 0) + size

    def count_starts(self, arrivals: Sequence[float], now: float) -> None:
        """Count the dispatch of requests that arrived at these times."""
        _add_times(self.queue_ms, arrivals, now)

    def count_successes(self, items: Sequence[Item], now: float, arrivals: Sequence[float] | None = None) -> None:
        """Count the answers to these requests; `arrivals`: when they arrived, if that is listed already."""
        self.succeeded += len(items)
        priorities = {items[0].priority} if are_alike(items) else {item.priority for item in items}
        for priority in priorities:
            mine = items if len(priorities) == 1 else [item for item in items if item.priority == priority]
            level = self.levels.at(priority)
            level.succeeded += len(mine)
            if arrivals is None or mine is not items:
                arrivals = [item.arrival for item in mine]
            _add_times(level.latency_ms, arrivals, now)
            if self.with_deadline:
                dues = [item.due for item in mine if item.due < math.inf]
                in_time = sum(now <= due for due in dues)
                level.in_time += in_time
                level.late += len(dues) - in_time

    def count_failure(self, item: Item) -> None:
        """Count a request that was answered with an error."""
        self.failed += 1
        self.levels.at(item.priority).failed += 1

    def count_late(self, item: Item) -> None:
        """Count a request whose deadline passed."""
        self.expired += 1
        self.levels.at(item.priority).late += 1

    def count_refusal(self, item: Item, why: Literal["overloaded", "refused", "too_large"]) -> None:
        """Count a request that was not taken, under the name of the counter for the reason."""
        setattr(self, why, getattr(self, why) + 1)
        self.levels.at(item.priority).refused += 1

    @property
    def sizes_by_reason(self) -> dict[str, float]:
        """Mean number of requests in the batches of each reason."""
        return {reason: self.items_by_reason.get(reason, 0) / count for reason, count in self.reasons.items()}

    @property
    def occupancy(self) -> float:
        """Mean number of requests in a batch."""
        return self.items / self.batches if self.batches else 0.0

    @property
    def padding_efficiency(self) -> float:
        """Lengths over padded lengths; 1.0 means no padding."""
        return self.tokens / self.cells if self.cells else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens in and out per second in the model."""
        return (self.tokens + self.generated_tokens) / self.model_seconds if self.model_seconds else 0.0

    def summary(self) -> str:
        """Return a few lines that answer "why didn't it batch?"; `print` shows them, too."""
        return "\n".join([self._ends(), *self._by_level(), *self._dispatches(), *self._costs(), *self._troubles()])

    def __str__(self) -> str:
        return self.summary()

    def _ends(self) -> str:
        counts = {"succeeded": self.succeeded, "failed": self.failed, "late": self.expired, "cancelled": self.cancelled}
        counts |= {"waiting": self.waiting, "running": self.running}
        return f"{self.requests} requests: {_listed(counts) or 'none has come yet'}"

    def _by_level(self) -> list[str]:
        """Return a line for each priority, if there are several."""
        lines = []
        for name, level in self.levels.ordered() if len(self.levels) > 1 else ():
            parts = [f"{level.succeeded} succeeded"]
            if level.latency_ms.count:
                parts.append(_times(level.latency_ms))
            if level.in_time_share is not None:
                parts.append(f"{level.in_time_share:.1%} in time")
            if others := _listed({"failed": level.failed, "refused": level.refused}):
                parts.append(others)
            lines.append(f"  priority {name}: {', '.join(parts)}")
        return lines

    def _dispatches(self) -> list[str]:
        if not self.batches:
            return ["no batch has been dispatched"]
        sizes = self.sizes_by_reason
        because = ", dispatched because" if sizes else ""
        lines = [f"{self.batches} batches, {self.occupancy:.1f} requests each{because}"]
        for reason, count in sorted(self.reasons.items(), key=lambda each: -each[1]):
            why = f" ({_WHY[reason]})" if reason in _WHY else ""
            lines.append(f"  {count / self.batches:4.0%} {reason}: {sizes[reason]:.1f} requests each{why}")
        return lines

    def _costs(self) -> list[str]:
        lines = []
        if self.cells:
            lines.append(f"padding: {1 - self.padding_efficiency:.0%} of the padded tokens")
        if self.queue_ms.count:
            lines.append(f"waited in the queue: {_times(self.queue_ms)}")
        if self.model_ms.count:
            lines.append(f"a batch in the model: {_times(self.model_ms)}, {self.tokens_per_second:,.0f} tokens/s")
        return lines

    def _troubles(self) -> list[str]:
        lines = []
        refused = _listed(
            {"queue full": self.overloaded, "certain to be late": self.refused, "too large": self.too_large}
        )
        if refused:
            lines.append(f"not taken: {refused}")
        again = _listed({"divided after a failure": self.splits, "out of memory": self.out_of_memory})
        if again:
            lines.append(f"batches tried again: {again}")
        if self.is_model_down:
            lines.append("the model is down: it fails every request, and is tried with one at a time")
        if self.memory_limit_mb is not None:
            lines.append(f"memory for a batch: {self.memory_limit_mb:.6g} MB now")
        return lines


@dataclass(slots=True)
class ContinuousStats(BatcherStats):
    """`BatcherStats` in which a batch is a step, and `occupancy` the mean number of sequences in a step.

    A step's reason is "full" if every slot was taken, and "idle" if no other request waited. `tokens` are the lengths
    of the prompts that were started, `generated_tokens` those of the outputs of requests that succeeded.
    """

    ttft_ms: Histogram = field(default_factory=Histogram)
    """Time from submission to the first token."""
    tpot_ms: Histogram = field(default_factory=Histogram)
    """Mean time between two tokens of a sequence, of sequences with at least two."""


def _add_times(histogram: Histogram, arrivals: Sequence[float], now: float) -> None:
    if arrivals.count(arrivals[0]) == len(arrivals):
        # They arrived in one turn of the event loop.
        histogram.add((now - arrivals[0]) * 1e3, len(arrivals))
    else:
        histogram.add_all([(now - arrival) * 1e3 for arrival in arrivals])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _times(histogram: Histogram) -> str:
    median, most = (histogram.percentile(q) or 0.0 for q in (50, 99))
    return f"median {_ms(median)}, 99% within {_ms(most)}"


def _ms(value: float) -> str:
    # Percentiles are accurate to three digits.
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
