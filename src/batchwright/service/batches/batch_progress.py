"""Progress, rate and expected end of a batch. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from batchwright.decayed_rate import DecayedRate
from batchwright.service.batches.batch_forecasts import MOST_BATCHES, BatchForecasts
from batchwright.store.records import ENDED, BatchRecord

_MEMORY = 120.0
"""Seconds over which the rate is averaged."""
_LEAST_SECONDS = 1.0
"""Least seconds of observation for a meaningful rate."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ProgressEstimate:
    """Progress of a batch."""

    total: int
    completed: int
    failed: int
    fraction: float
    """Share of the tokens that are computed, or, while that is not known, of the lines that are finished, 0..1; 1
    once the batch has ended."""
    lines_per_second: float | None
    """Finished lines per second; None: not known yet."""
    eta_seconds: float | None
    """Seconds until the last line, as foreseen; None: too little is known, or the batch is paused."""


class BatchRate:
    """Rate at which lines of one batch are finished, with more weight on recent ones.

    Only time for which the batch was observed and running counts, so pauses and restarts do not lower the rate.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self._done = 0
        self._lines = DecayedRate(_MEMORY)

    def observe(self, now: float, done: int, *, running: bool = True) -> None:
        """Note that `done` lines were finished at `now`. `running`: more may finish until the next observation."""
        if self._at is not None and now > self._at and done >= self._done:
            self._lines.elapse(now - self._at)
            self._lines.add(done - self._done)
        self._at = now if running else None
        self._done = done

    @property
    def rate(self) -> float | None:
        """Lines per second; None: not known yet."""
        lines = self._lines
        return lines.events / lines.seconds if lines.seconds >= _LEAST_SECONDS and lines.events > 0 else None


class BatchRates:
    """Rates of recent batches, from their records and from what a worker in this process commits."""

    def __init__(self, forecasts: BatchForecasts | None = None) -> None:
        self.forecasts = forecasts or BatchForecasts()
        self._seen: dict[str, BatchRate] = {}
        self._committed: dict[str, tuple[BatchRate, int]] = {}

    def committed(self, batch_id: str, lines: int, now: float) -> None:
        """Note that a worker in this process committed `lines` more lines."""
        rate, done = self._committed.pop(batch_id, (BatchRate(), 0))
        rate.observe(now, done + lines)
        self._committed[batch_id] = (rate, done + lines)
        _drop_oldest(self._committed)

    def progress(self, batch: BatchRecord, now: float) -> ProgressEstimate:
        """Return the progress of `batch`, which was read at `now`."""
        counts = batch.counts
        done = counts.completed + counts.failed
        ended = batch.status in ENDED
        runs = batch.status == "in_progress" and batch.ending is None and not batch.paused
        rate = self._rate(batch.id, done, runs, now)
        if ended or batch.ending is not None:
            fraction = 1.0 if ended else done / counts.total if counts.total else 0.0
            return ProgressEstimate(counts.total, counts.completed, counts.failed, fraction, rate, 0.0)
        forecast = self.forecasts.of(batch, now)
        if forecast is not None and forecast.tokens_done + forecast.tokens_left > 0:
            fraction = forecast.fraction
        else:
            # Not known yet, or of an endpoint that counts no tokens.
            fraction = done / counts.total if counts.total else 0.0
        eta = forecast.seconds_left if forecast is not None and runs else None
        return ProgressEstimate(counts.total, counts.completed, counts.failed, fraction, rate, eta)

    def _rate(self, batch_id: str, done: int, runs: bool, now: float) -> float | None:
        rate = self._seen.pop(batch_id, None) or BatchRate()
        rate.observe(now, done, running=runs)
        if not runs:
            self._committed.pop(batch_id, None)
        self._seen[batch_id] = rate
        _drop_oldest(self._seen)
        own, _ = self._committed.get(batch_id, (rate, 0))
        # Lines committed here are a part of all lines, and are known sooner.
        rates = [each.rate for each in (rate, own) if each.rate is not None]
        return max(rates) if runs and rates else None


def _drop_oldest(batches: dict[str, _T]) -> None:
    if len(batches) > MOST_BATCHES:
        del batches[next(iter(batches))]
