"""The time of a sampled job, by a cost model and lengths that are given."""

from __future__ import annotations

import pytest

from batchwright.engine_config import EngineConfig
from batchwright.jobs import planned_time
from batchwright.jobs.earlier_answers import LikelyLengths
from batchwright.jobs.lines import Line
from batchwright.jobs.planned_time import PlannedTime, SampledJob, SampledLine
from batchwright.lines.forecast import AnswerLengths
from batchwright.scheduling.sizes import EngineSizes
from batchwright.scheduling.step_costs import StepCosts
from batchwright.simulation.fleet import Fleet
from batchwright.simulation.requests import SimulatedRequest

COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3))
LINES, LIMIT = 120, 400


def told(length: int, error: float) -> PlannedTime:
    """The time of lines whose answers have `length` tokens, and are that long within a factor."""
    fleet = Fleet(1, EngineSizes(256, 4, 1024, 400), EngineConfig(), COSTS, seed=None)
    lines = [
        SampledLine(
            Line(number, None, "/v1/completions", {"prompt": "text"}),
            [SimulatedRequest(prompt_tokens=50 + number, output_tokens=LIMIT, max_tokens=LIMIT)],
        )
        for number in range(LINES)
    ]
    prompts = sum(each.requests[0].prompt_tokens for each in lines)
    lengths = AnswerLengths([0] * length + [1000], [0], (), {LIMIT: LINES}, prior=0.0)
    likely = LikelyLengths(lengths, (error, error), "same job", 1)
    return SampledJob(fleet, lines, LINES, 0.0).time(likely, prompts)


@pytest.mark.parametrize("most_stepped", [1000, 4000, 100_000])
@pytest.mark.parametrize("length", [20, 100])
def test_the_ends_of_an_interval_are_told_as_its_middle_is(
    monkeypatch: pytest.MonkeyPatch, most_stepped: int, length: int
) -> None:
    monkeypatch.setattr(planned_time, "MOST_STEPPED", most_stepped)
    sure = told(length, 0.0)
    assert sure.between == pytest.approx((sure.seconds, sure.seconds))
    unsure = told(length, 0.5)
    least, most = (each / unsure.seconds for each in unsure.between)
    assert 0.5 < least < 0.9
    assert 1.15 < most < 1.75
