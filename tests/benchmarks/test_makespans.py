"""The benchmark of makespans in virtual time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.foresight import makespans

from batchwright.simulation.requests import SimulatedRequest


def test_no_order_is_faster_than_the_bound_of_makespans() -> None:
    draw = random.Random(0)
    blocks = [(1, 2, task) for task in range(4)]
    lines = [
        SimulatedRequest(
            prompt_tokens=60 + number, output_tokens=draw.randint(1, 200), blocks=blocks[number % 4], block_tokens=16
        )
        for number in range(40)
    ]
    for device in makespans.DEVICES:
        ratios = makespans.makespans(device, lines)
        assert set(ratios) > {makespans.PLANNED, makespans.ARRIVAL}
        # All of them fit at once, so that the longest answer is all that counts, beside their prompts.
        assert all(0.999 <= each < 1.2 for each in ratios.values()), ratios


def test_a_trace_that_is_too_short_for_a_job_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n" + "10,5\n" * 100)
    with pytest.raises(ValueError, match=r"lengths\.csv: 100 requests; a job takes 4,000"):
        makespans.jobs(trace)
