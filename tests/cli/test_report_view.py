"""The report of a run as a terminal shows it."""

from __future__ import annotations

import io

from rich.console import Console

from batchwright.cli.report_view import report_table
from batchwright.engine.engine_stats import EngineStats
from batchwright.jobs.loop import Tally
from batchwright.jobs.report import RunReport


def shown(stats: EngineStats) -> dict[str, str]:
    """The lines below the title, by the name in front."""
    tally = Tally(prompt_tokens=1200, generated_tokens=40)
    report = RunReport.of_run(tally, stats, loop_seconds=2.0, model_seconds=1.5, output="out", model="m", total=2)
    written = io.StringIO()
    Console(file=written, width=120).print(report_table(report))
    rows = [line.partition("  ") for line in written.getvalue().splitlines()[1:]]
    return {name: value.strip() for name, _, value in rows}


def test_figures_of_the_engine_are_shown_when_it_computed() -> None:
    assert [*shown(EngineStats())] == ["wall time", "peak memory"]
    lines = shown(EngineStats(steps=7, occupancy_sum=21, occupancy_peak=5, max_num_seqs=8, kv_blocks=4))
    assert lines["occupancy"] == "3.0 sequences in a step, peak 5 of 8, 7 steps"
    assert lines["tokens"] == "1,200 prompt, 40 generated"
    assert lines["outside model"] == "0.50 s (25% of the loop)"
    assert lines["TTFT"] == "none"


def test_guessed_tokens_are_shown_when_there_were_any() -> None:
    assert "drafting" not in shown(EngineStats(steps=1))
    lines = shown(EngineStats(steps=1, drafted_tokens=1377, accepted_tokens=1204))
    assert lines["drafting"] == "1,204 of 1,377 guessed tokens were right"
