"""Figures of several engines as those of one."""

from __future__ import annotations

import pytest

from batchwright.engine.engine_stats import EngineStats
from batchwright.histograms import Recent


def stats(steps: int, latency: float) -> EngineStats:
    made = EngineStats(implementation="x", max_num_seqs=8, block_size=16, steps=steps, occupancy_peak=steps)
    made.peak_memory_bytes = 100
    made.latency_ms.add(latency)
    made.traffic["batch"].running = steps
    made.traffic["batch"].recent_ttft_ms.add(latency)
    return made


def test_counts_are_added_and_what_is_gone_holds_nothing() -> None:
    merged = EngineStats.merged([stats(1, 10.0), stats(2, 20.0)], [stats(4, 40.0)])
    assert (merged.steps, merged.max_num_seqs, merged.occupancy_peak, merged.block_size) == (7, 16, 4, 16)
    assert (merged.latency_ms.count, merged.latency_ms.maximum) == (3, 40.0)
    assert merged.peak_memory_bytes == 200
    assert merged.traffic["batch"].running == 3
    assert len(merged.traffic["batch"].recent_ttft_ms) == 3
    assert EngineStats.merged([stats(1, 1.0)]).steps == 1
    with pytest.raises(ValueError, match="at least one"):
        EngineStats.merged([])


def test_the_last_values_of_each_are_kept() -> None:
    recents = [Recent(), Recent(), Recent()]
    for value in range(10):
        recents[0].add(value)
        recents[1].add(100 + value)
    merged = Recent.merged(recents, size=4)
    assert sorted(merged._values) == [8, 9, 108, 109]
