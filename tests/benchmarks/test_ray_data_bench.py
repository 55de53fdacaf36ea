"""Which ways of the benchmark of Ray Data are measured, and how they are compared."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from benchmarks.ray_forms import measure as measuring
from benchmarks.ray_forms.measure import Way, measure


def test_after_the_first_round_only_the_fastest_way_of_vllm_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, ours = Way("direct", "run"), Way("ours", "batchwright", "m")
    slow, fast = Way("slow", "vllm", "m"), Way("fast", "vllm", "m")
    seconds = {ours: 2.0, slow: 8.0, fast: 5.0}
    monkeypatch.setattr(measuring, "_of_file", lambda job: 1.0)
    monkeypatch.setattr(measuring, "_of_dataset", lambda way, job: seconds[way])
    monkeypatch.setattr(measuring, "resolve", lambda model: model)
    found = measure(
        [direct, ours, slow, fast],
        model="m", rows=10, tokens=1, batch_size=4, rounds=3, vllm_rounds=2, say=lambda text: None,
    )  # fmt: skip
    assert {way.name: rates for way, rates in found.rates.items()} == {
        "direct": [10.0] * 3,
        "ours": [5.0] * 3,
        "slow": [1.25],
        "fast": [2.0] * 2,
    }
    assert found.ratios(ours, direct) == [0.5] * 3
    assert found.ratios(ours, fast) == [2.5] * 2
