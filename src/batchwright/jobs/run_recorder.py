"""`RunRecorder`: samples the figures of a run as it goes on, for what its report shows over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from batchwright.clock import Clock
from batchwright.jobs.loop import Tally
from batchwright.jobs.run_series import RunPoint, RunSeries, lengths_of
from batchwright.lines.forecast import Forecast
from batchwright.pacing.figures import PacerFigures

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats


class RunRecorder:
    """Records one run. `stats` returns the figures of its engine, zeros without one; `spent` the dollars of the job."""

    def __init__(
        self, clock: Clock, tally: Tally, stats: Callable[[], EngineStats], spent: Callable[[], float | None]
    ) -> None:
        self._clock = clock
        self._tally = tally
        self._stats = stats
        self._spent = spent
        self._series = RunSeries()

    def begin(self) -> None:
        """Count from this moment."""
        self._began = self._clock.now()
        self._before = self._stats().copy()
        self._spent_before = self._spent() or 0.0
        self.observe(0, {}, None)

    def observe(self, running: int, pacing: Mapping[str, PacerFigures], forecast: Forecast | None) -> None:
        """Record the figures now, with `running` lines being computed, if a point is due."""
        seconds = self._clock.now() - self._began
        if self._series.is_due(seconds):
            self._series.add(self._point(seconds, running, pacing, forecast))

    def end(self, pacing: Mapping[str, PacerFigures]) -> None:
        """Record the figures of the whole run."""
        self._series.add(self._point(self._clock.now() - self._began, 0, pacing, None))

    def _point(
        self, seconds: float, running: int, pacing: Mapping[str, PacerFigures], forecast: Forecast | None
    ) -> RunPoint:
        tally, stats, before = self._tally, self._stats(), self._before
        spent = self._spent()
        point = RunPoint(
            seconds=seconds,
            lines=tally.succeeded + tally.failed,
            prompt_tokens=tally.prompt_tokens,
            cached_tokens=tally.cached_tokens,
            computed_prompt_tokens=None,
            generated_tokens=tally.generated_tokens,
            steps=None,
            sequences=None,
            model_seconds=None,
            preemptions=None,
            sent=sum(each.sent for each in pacing.values()) if pacing else None,
            refused=sum(each.refused for each in pacing.values()) if pacing else None,
            cost=None if spent is None else spent - self._spent_before,
            running=running,
            kv_blocks=None,
            seconds_left=None if forecast is None else forecast.seconds_left,
            work_left=None if forecast is None else forecast.tokens_left,
            work_done=None if forecast is None else forecast.tokens_done,
        )
        if not stats.max_num_seqs:
            return point
        return replace(
            point,
            computed_prompt_tokens=stats.prefill_tokens - before.prefill_tokens,
            generated_tokens=stats.generated_tokens - before.generated_tokens,
            steps=stats.steps - before.steps,
            sequences=stats.occupancy_sum - before.occupancy_sum,
            model_seconds=stats.model_seconds - before.model_seconds,
            preemptions=stats.preemptions - before.preemptions,
            kv_blocks=stats.kv_blocks_used,
        )

    def series(self) -> dict[str, list[float | None]]:
        """Return the figures over time, by name."""
        return self._series.to_dict()

    def lengths(self) -> dict[str, Any]:
        """Return the lengths of the answers, expected and actual."""
        return lengths_of(self._tally.answers, self._tally.lengths)
