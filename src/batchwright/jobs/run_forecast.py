"""Forecast of the end of a run, from what its engine or its endpoint has computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchwright.clock import Clock
from batchwright.decayed_rate import DecayedRate
from batchwright.jobs.job import Job
from batchwright.jobs.loop import Tally
from batchwright.lines.forecast import Forecast, Forecaster, WorkSoFar
from batchwright.planning.intervals import ForecastIntervals

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine

_MADE_EVERY = 0.5
"""Seconds for which a forecast is reused."""
_MEMORY = 120.0
"""Seconds over which the rate of an endpoint is averaged."""


class RunForecast:
    """The forecast of one run. With an engine it is based on tokens, otherwise on lines."""

    def __init__(self, job: Job, engine: Engine | None, clock: Clock) -> None:
        self._job = job
        self._clock = clock
        self._engine = engine if engine is not None and hasattr(engine.core, "unfinished_work") else None
        self._lines_total = job.total - len(job.finished)
        self._weight_total = job.weight * self._lines_total / max(1, job.total)
        self._forecaster = Forecaster()
        self._rate = DecayedRate(_MEMORY)
        self._counted = 0
        self._intervals = ForecastIntervals()
        self.between: tuple[float, float] | None = None
        """The least and the most seconds that are left, in nine cases of ten; None while too little is known."""
        self._made_at = clock.now()
        self._forecast: Forecast | None = None
        if self._engine is not None:
            stats = self._engine.stats
            self._before = stats.steps, stats.prefill_tokens, stats.generated_tokens

    def of(self, tally: Tally, running: int) -> Forecast | None:
        """The forecast now, with `running` lines being computed; None while too little is known."""
        now = self._clock.now()
        if now - self._made_at >= _MADE_EVERY:
            elapsed, self._made_at = now - self._made_at, now
            if self._engine is None:
                self._forecast = self._by_lines(tally, running, elapsed)
            else:
                self._forecast = self._forecaster.observe(self._work(self._engine, tally, now))
            if (made := self._forecast) is not None:
                self.between = self._intervals.observe(now, made.tokens_done, made.tokens_left, made.seconds_left)
        return self._forecast

    def expected_tokens(self, limit: int) -> float | None:
        """The tokens expected of an answer that begins now and may have `limit`; None while too little is known."""
        lengths = self._forecaster.lengths
        return None if lengths is None else lengths.expected(limit)

    def _work(self, engine: Engine, tally: Tally, now: float) -> WorkSoFar:
        steps, prompt_tokens, generated_tokens = self._before
        unfinished = engine.core.unfinished_work()
        tokens = engine.stats.prefill_tokens + engine.stats.generated_tokens
        return WorkSoFar(
            at=now,
            weight_read=tally.weight_read,
            weight_total=self._weight_total,
            lines_read=tally.lines_read,
            lines_total=self._lines_total,
            steps=engine.stats.steps - steps,
            step_tokens=tokens - prompt_tokens - generated_tokens,
            prompt_tokens=engine.stats.prefill_tokens - prompt_tokens,
            generated_tokens=engine.stats.generated_tokens - generated_tokens,
            answers=tally.answers,
            running=unfinished.answers,
            prompt_tokens_left=unfinished.prompt_tokens_left,
            places=engine.stats.max_num_seqs,
        )

    def _by_lines(self, tally: Tally, running: int, elapsed: float) -> Forecast | None:
        """A forecast from the rate of lines that were computed; others do not count, as they end at once."""
        computed = tally.succeeded - tally.deduplicated
        self._rate.elapse(elapsed)
        self._rate.add(computed - self._counted)
        self._counted = computed
        if not self._rate.rate:
            return None
        done = tally.succeeded + tally.failed
        share = computed / done
        unread = max(0, self._lines_total - tally.lines_read) * share
        left = unread + running / 2
        return Forecast(left / self._rate.rate, computed, unread + running)
