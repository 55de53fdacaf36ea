"""Forecasts of batches: from the worker of this process, from those of others, and from lines where tokens are not
known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.service.support import House, Model, in_house, refuse

from batchwright.inference.inference import WorkUnderWay
from batchwright.service.batches.batch_forecasts import MOST_BATCHES, BatchForecasts
from batchwright.service.batches.batch_progress import BatchRates
from batchwright.store.records import BatchRecord, ClaimedLine, LineCounts, TokenUsage

BATCH = BatchRecord(
    "batch_0", "tenant", "/v1/completions", "file", "24h", 0.0, 86400.0, status="in_progress",
    counts=LineCounts(1000), enqueued_tokens=25_000,
)  # fmt: skip
TOKENS = 32
"""Tokens of each answer: its limit."""


def claimed(number: int, batch_id: str = BATCH.id) -> ClaimedLine:
    return ClaimedLine(batch_id, number, 1, f"{number}", number * 100, 100, "file", "/v1/completions", 86400.0)


def content(max_tokens: int = TOKENS) -> bytes:
    return msgspec.json.encode({"body": {"prompt": "p", "max_tokens": max_tokens}})


def answer(tokens: int = TOKENS) -> dict[str, Any]:
    usage = {"prompt_tokens": 10, "completion_tokens": tokens}
    return {"choices": [{"finish_reason": "length"}], "usage": usage}


def computed(forecasts: BatchForecasts, lines: int, *, seconds_per_step: float = 0.1, places: int = 10) -> BatchRecord:
    """Compute so many lines, `places` at once in 32 steps; their batch afterwards."""
    now = steps = tokens = 0
    batch = BATCH
    for wave in range(lines // places):
        first = wave * places
        running = [claimed(first + place) for place in range(places)]
        for step in (8, 24):
            work = WorkUnderWay(
                steps=steps + step,
                step_tokens=tokens + places * (10 + step),
                running=[(step, TOKENS)] * places,
                prompt_tokens=10 * places,
                prompt_tokens_left=0,
                places=places,
                longest=512,
            )
            forecasts.observe(batch, running, work, (now + step) * seconds_per_step)
        now += TOKENS
        steps += TOKENS
        tokens += places * (10 + TOKENS)
        for line in running:
            forecasts.ended(line, content(), answer())
        done = first + places
        batch = replace(BATCH, counts=LineCounts(1000, done), usage=TokenUsage(10 * done, 0, TOKENS * done))
    return batch


def test_the_end_is_foreseen_from_steps_and_tokens() -> None:
    forecasts = BatchForecasts()
    batch = computed(forecasts, 200)
    now = 20 * TOKENS * 0.1
    forecast = forecasts.of(batch, now)
    assert forecast is not None
    assert forecast.seconds_left == pytest.approx(80 * TOKENS * 0.1, rel=0.1)
    assert forecast.fraction == pytest.approx(0.2, abs=0.02)
    # It is counted down until the next one, and forgotten when there is none for long.
    later = forecasts.of(batch, now + 10.0)
    assert later is not None
    assert later.seconds_left == pytest.approx(forecast.seconds_left - 10.0)
    assert forecasts.of(batch, now + 100.0) is None


def test_workers_are_together_as_fast_as_the_sum_of_their_rates() -> None:
    told: list[dict[str, Any]] = []
    forecasts = BatchForecasts(lambda: told)
    batch = computed(forecasts, 200)
    now = 20 * TOKENS * 0.1
    alone = forecasts.of(batch, now)
    assert alone is not None
    told += [{"forecasts": forecasts.published(now)}, {"forecasts": {BATCH.id: "of another version"}}, {"lines": 3}]
    both = forecasts.of(batch, now)
    assert both is not None
    assert both.seconds_left == pytest.approx(alone.seconds_left / 2, rel=0.01)
    # A process without a worker knows what others published.
    elsewhere = BatchForecasts(lambda: told).of(batch, now)
    assert elsewhere is not None
    assert elsewhere.seconds_left == pytest.approx(alone.seconds_left, rel=0.01)
    assert elsewhere.fraction == pytest.approx(alone.fraction, rel=0.01)


def test_a_pause_is_not_taken_for_slow_steps() -> None:
    forecasts = BatchForecasts()
    batch = computed(forecasts, 200)
    before = forecasts.of(batch, 20 * TOKENS * 0.1)
    work = WorkUnderWay(20 * TOKENS + 8, 20 * 420 + 180, [(8, TOKENS)] * 10, 100, 0, 10, 512)
    forecasts.observe(batch, [claimed(200 + place) for place in range(10)], work, 10_000.0)
    after = forecasts.of(batch, 10_000.0)
    assert before is not None
    assert after is not None
    assert after.seconds_left == pytest.approx(before.seconds_left, rel=0.05)


def test_lines_that_fail_at_once_are_no_speed() -> None:
    forecasts = BatchForecasts()
    succeeded = failed = 0
    for second in range(20):
        batch = replace(BATCH, counts=LineCounts(1000, succeeded, failed))
        forecasts.observe(batch, [], None, float(second))
        for place in range(20):
            # Ten fail for each that succeeds.
            fails = place < 18
            forecasts.ended(claimed(second * 20 + place), content(), None if fails else answer())
            succeeded, failed = succeeded + (not fails), failed + fails
    progress = BatchRates(forecasts).progress(replace(BATCH, counts=LineCounts(1000, succeeded, failed)), 19.0)
    # Two of twenty lines take one second, and 600 are left.
    assert progress.eta_seconds == pytest.approx(600 / 20, rel=0.1)


def test_a_paused_batch_has_no_end_and_one_that_ends_nothing_left() -> None:
    forecasts = BatchForecasts()
    batch = computed(forecasts, 200)
    rates, now = BatchRates(forecasts), 20 * TOKENS * 0.1
    paused = rates.progress(replace(batch, paused=True), now)
    assert paused.eta_seconds is None
    assert paused.fraction == pytest.approx(0.2, abs=0.02)
    assert rates.progress(replace(batch, paused=True), now + 86400.0).fraction == paused.fraction
    assert rates.progress(replace(batch, ending="cancelled"), now).eta_seconds == 0.0
    assert rates.progress(replace(batch, status="completed"), now).fraction == 1.0


def test_an_endpoint_that_counts_no_tokens_has_progress_in_lines() -> None:
    forecasts = BatchForecasts()
    for second in range(3):
        forecasts.observe(replace(BATCH, counts=LineCounts(10, 2 * second)), [], None, float(second))
        for place in range(2):
            forecasts.ended(claimed(2 * second + place), content(), {"choices": [{"finish_reason": "stop"}]})
    progress = BatchRates(forecasts).progress(replace(BATCH, counts=LineCounts(10, 6)), 3.0)
    assert progress.fraction == 0.6
    assert progress.eta_seconds is not None


def test_what_another_version_publishes_is_left_alone() -> None:
    told: list[dict[str, Any]] = [
        {"forecasts": {BATCH.id: [None, 1, 2]}},
        {"forecasts": {BATCH.id: ["1", 1, 2]}},
        {"forecasts": 7},
    ]
    assert BatchForecasts(lambda: told).of(BATCH, 0.0) is None


def test_old_batches_are_forgotten() -> None:
    forecasts = BatchForecasts()
    for number in range(3 * MOST_BATCHES):
        forecasts.ended(claimed(1, f"batch_{number}"), content(), answer())
    assert len(forecasts._work) == MOST_BATCHES


@in_house
async def test_a_worker_foresees_the_end_of_its_batch(house: House) -> None:
    model = Model(slots=10)
    # Of one size, so that they are computed in the order of the file.
    bad = [f"bad_{number:03}" for number in range(300)]
    model.faults, model.delays = refuse(*bad), dict.fromkeys(bad, 0.0)
    async with house.worker(model) as worker:
        batch = await house.submit([name for number, each in enumerate(bad) for name in (each, f"good{number:03}")])
        await house.until(lambda: worker.stats.succeeded >= 100)
        eta, now = house.jobs.progress(await house.batch(batch)).eta_seconds, house.clock.now()
        await house.ended(batch)
        assert eta == pytest.approx(house.clock.now() - now, rel=0.15)
