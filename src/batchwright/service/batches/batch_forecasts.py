"""Forecasts of the ends of batches, from what the worker of this process and those of others compute. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchwright.decayed_rate import DecayedRate
from batchwright.inference.inference import WorkUnderWay
from batchwright.limiting.estimates import bytes_of_tokens
from batchwright.lines.batch_line import decode_line, token_count
from batchwright.lines.forecast import LONGEST_COUNTED, AnswerTally, Forecast, Forecaster, WorkSoFar, answer_limit
from batchwright.store.records import BatchRecord, ClaimedLine

_MEMORY = 120.0
"""Seconds over which the rate of lines is averaged, where tokens are not known until a line ends."""
_GAP = 10.0
"""Seconds between two observations above which the time between them says nothing about the work."""
_KEPT = 60.0
"""Seconds after which a forecast is outdated."""
MOST_BATCHES = 1000
"""Most batches that are remembered: those worked on last."""


@dataclass(slots=True)
class _Work:
    """Work of the worker of this process on one batch."""

    answers: AnswerTally = field(default_factory=AnswerTally)
    succeeded: int = 0
    failed: int = 0
    bytes: int = 0
    """Size of the lines that ended."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    in_engine: bool = False
    """Whether an engine in this process computes it."""
    longest: int = LONGEST_COUNTED
    forecaster: Forecaster = field(default_factory=Forecaster)
    lines: DecayedRate = field(default_factory=lambda: DecayedRate(_MEMORY))
    """Lines that succeeded."""
    counted: int = 0
    at: float | None = None
    """Time of the last observation."""
    forecast: Forecast | None = None
    running_tokens: int = 0
    """Tokens computed for lines that had not ended then."""

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed


class BatchForecasts:
    """Forecasts of running batches. Each worker foresees the end as if it computed all remaining lines alone."""

    def __init__(self, others: Callable[[], Iterable[Mapping[str, Any]]] = lambda: ()) -> None:
        """`others` returns what other processes last published."""
        self._others = others
        self._work: dict[str, _Work] = {}

    def ended(self, line: ClaimedLine, content: bytes, answer: Mapping[str, Any] | None) -> None:
        """Count a line that the worker of this process computed, given its text; without an answer it failed."""
        work = self._of(line.batch_id)
        work.bytes += line.length
        if answer is None:
            work.failed += 1
            return
        work.succeeded += 1
        work.prompt_tokens += token_count(answer, "prompt_tokens")
        work.prompt_tokens -= token_count(answer, "cached_tokens", "prompt_tokens_details")
        work.generated_tokens += token_count(answer, "completion_tokens")
        work.answers.count(answer, answer_limit(decode_line(content)["body"], work.longest))

    def observe(
        self, batch: BatchRecord, running: Sequence[ClaimedLine], engine: WorkUnderWay | None, now: float
    ) -> None:
        """Make a forecast for a batch whose lines `running` are being computed by the worker of this process."""
        work, counts = self._of(batch.id), batch.counts
        unread = max(0, counts.total - counts.completed - counts.failed - len(running))
        if work.at is not None and now - work.at > _GAP:
            work.forecaster.interrupted()
            work.at = None
        if engine is None and work.in_engine:
            return  # between two lines, the engine has no work of this batch
        if engine is None:
            work.forecast = _by_lines(work, unread, len(running), 0.0 if work.at is None else now - work.at)
        else:
            work.in_engine = True
            work.longest = min(engine.longest, LONGEST_COUNTED)
            work.forecast = work.forecaster.observe(_so_far(work, batch, running, unread, engine, now))
            work.running_tokens = engine.prompt_tokens + sum(tokens for tokens, _ in engine.running)
        work.at = now

    def published(self, now: float) -> dict[str, list[float]]:
        """Return the forecasts of this process, to be published to others."""
        return {
            batch_id: [round(forecast.seconds_left, 1), round(forecast.tokens_done), round(forecast.tokens_left)]
            for batch_id in self._work
            if (forecast := self._current(batch_id, now)) is not None
        }

    def forget(self, batch_id: str) -> None:
        """Forget a batch that ended."""
        self._work.pop(batch_id, None)

    def of(self, batch: BatchRecord, now: float) -> Forecast | None:
        """Return the forecast of a batch by all workers that compute it; None while too little is known.

        The forecast of a paused batch does not change.
        """
        own = self._current(batch.id, now, paused=batch.paused)
        found = [] if own is None else [own]
        for snapshot in self._others():
            forecasts = snapshot.get("forecasts")
            each = forecasts.get(batch.id) if isinstance(forecasts, dict) else None
            if isinstance(each, list) and len(each) == 3 and all(isinstance(value, (int, float)) for value in each):
                found.append(Forecast(*map(float, each)))
        if not found:
            return None
        # Each forecast is for its worker alone; together, workers are as fast as the sum of their rates.
        seconds = 1.0 / sum(1.0 / max(1e-3, each.seconds_left) for each in found)
        usage = batch.usage
        running = sum(each.tokens_done for each in found)
        done = usage.input_tokens - usage.cached_tokens + usage.output_tokens + running
        return Forecast(seconds, done, sum(each.tokens_left for each in found) / len(found))

    def _of(self, batch_id: str) -> _Work:
        work = self._work.pop(batch_id, None) or _Work()
        self._work[batch_id] = work
        if len(self._work) > MOST_BATCHES:
            del self._work[next(iter(self._work))]
        return work

    def _current(self, batch_id: str, now: float, *, paused: bool = False) -> Forecast | None:
        """The forecast of this process; its `tokens_done` are those of lines that have not ended."""
        work = self._work.get(batch_id)
        if work is None or work.forecast is None or work.at is None or (now - work.at > _KEPT and not paused):
            return None
        return Forecast(
            max(0.0, work.forecast.seconds_left - (now - work.at)), work.running_tokens, work.forecast.tokens_left
        )


def _so_far(
    work: _Work, batch: BatchRecord, running: Sequence[ClaimedLine], unread: int, engine: WorkUnderWay, now: float
) -> WorkSoFar:
    read = work.ended + len(running)
    bytes_read = work.bytes + sum(line.length for line in running)
    if batch.parent_id is None and batch.enqueued_tokens:
        # Lines are not claimed in the order of the file, so remaining lines and those of other workers are assumed to
        # have the same mean size.
        others = max(0, bytes_of_tokens(batch.enqueued_tokens) - bytes_read)
        bytes_unread = others * unread / max(1, unread, batch.counts.total - read)
    else:
        bytes_unread = unread * bytes_read / max(1, read)
    return WorkSoFar(
        at=now,
        weight_read=bytes_read,
        weight_total=bytes_read + bytes_unread,
        lines_read=read,
        lines_total=read + unread,
        steps=engine.steps,
        step_tokens=engine.step_tokens,
        prompt_tokens=work.prompt_tokens + engine.prompt_tokens,
        generated_tokens=work.generated_tokens + sum(tokens for tokens, _ in engine.running),
        answers=work.answers,
        running=engine.running,
        prompt_tokens_left=engine.prompt_tokens_left,
        places=engine.places,
    )


def _by_lines(work: _Work, unread: int, running: int, elapsed: float) -> Forecast | None:
    """A forecast from the rate of lines that succeeded; those that fail at once say nothing about it."""
    work.lines.elapse(elapsed)
    if elapsed > 0:
        work.lines.add(work.succeeded - work.counted)
    work.counted = work.succeeded
    if not work.lines.rate:
        return None
    left = unread * work.succeeded / work.ended + running / 2
    tokens = (work.prompt_tokens + work.generated_tokens) / work.succeeded
    return Forecast(left / work.lines.rate, 0.0, left * tokens)
