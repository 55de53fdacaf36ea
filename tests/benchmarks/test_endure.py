"""The endurance benchmark: what grows is found to grow, and the page says what was measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.endure import report
from benchmarks.endure.batch import BatchFigures
from benchmarks.endure.clients import Reply
from benchmarks.endure.cores import Cores
from benchmarks.endure.probe import HealthProbe, Probed
from benchmarks.endure.run import Endured, Setting
from benchmarks.endure.watch import Sample, lives, look, seconds_watched, slope_per_hour, warm


def _sample(at: float, rss: float, life: float = 1.0) -> Sample:
    return Sample(at, life, rss, descriptors=30, threads=10)


def test_a_slope_is_that_within_each_process() -> None:
    """A restart, after which less is held, is no shrinking; a second level is no growth."""
    first = [_sample(at, 200 + at / 60) for at in range(0, 600, 10)]
    second = [_sample(at, 100 + at / 60, life=2.0) for at in range(700, 1300, 10)]
    assert slope_per_hour([*first, *second], lambda each: each.rss) == pytest.approx(60)
    flat = [*(replace(each, rss=200) for each in first), *(replace(each, rss=300) for each in second)]
    assert slope_per_hour(flat, lambda each: each.rss) == pytest.approx(0)
    assert slope_per_hour([first[0], second[0]], lambda each: each.rss) is None
    assert [len(each) for each in lives(flat)] == [60, 60]
    assert seconds_watched(flat) == 590 + 590
    assert [each.at for each in warm(flat, 580)] == [580, 590, 1280, 1290]


def test_a_process_is_looked_at_until_it_has_ended() -> None:
    sample = look(os.getpid())
    assert sample is not None
    assert sample.rss > 10
    assert sample.descriptors > 2
    assert look(2**22 + 1) is None


@pytest.mark.parametrize(
    ("available", "engine", "http", "generator"),
    [
        ({3}, {3}, {3}, {3}),
        ({0, 1}, {0}, {1}, {1}),
        ({0, 1, 2}, {0}, {1}, {2}),
        ({0, 1, 2, 5}, {0, 1}, {2}, {5}),
    ],
)
def test_cores(available: set[int], engine: set[int], http: set[int], generator: set[int]) -> None:
    assert Cores.shared_out(available) == Cores(frozenset(engine), frozenset(http), frozenset(generator))


def test_what_the_probe_wrote_is_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "health.jsonl"
    probe = HealthProbe(1, file)
    assert probe.read() == []
    file.write_text("[1.0, 0.5, true]\n[2.0, 0.25, false]\n[3.0, 0.")
    assert probe.read() == [Probed(1.0, 0.5, answered=True), Probed(2.0, 0.25, answered=False)]


@pytest.fixture
def found() -> Endured:
    return Endured(
        Setting(clients=512, lines=5000, seconds=600, ramp=60, calibration=240, share=0.7),
        Cores.shared_out({0, 1}),
        capacity=20.0,
        thinking=36.6,
        window=(0.0, 600.0),
        replies=[Reply("stream", at, at + 0.5, at + 2.0) for at in range(500)]
        + [Reply("plain", at, at + 3.0, at + 3.0) for at in range(500)],
        probed=[Probed(at / 10, 0.004, answered=True) for at in range(6000)],
        samples=[_sample(at, 1000) for at in range(600)],
        stolen=[(at, 0.0) for at in range(600)],
        batch_lines=4000,
        batch=BatchFigures(ended=1, lines=5000),
    )


def test_the_page_has_the_figures_the_bars_and_who_had_which_core(found: Endured) -> None:
    page = report.page(found)
    assert page.count("**Met.**") == 3
    assert "its engine computes there; then the thread of its event loop was moved to core 1" in page
    (row,) = [line for line in page.splitlines() if "first text of a stream" in line]
    assert row.split("|")[2].strip() == "0.50 / 0.50"
    assert "20.0 answers/s" in page


def test_each_bar_can_be_missed(found: Endured) -> None:
    for worse in (
        replace(found, replies=[*found.replies, Reply("plain", 1, 2, 2, "429 too many")]),
        replace(found, batch=BatchFigures(ended=1, lines=4999, failed=1)),
        replace(found, samples=[_sample(at, 1000 + at / 10) for at in range(600)]),
        replace(found, probed=[replace(each, seconds=0.2) for each in found.probed]),
        replace(found, probed=[*found.probed, Probed(600.0, 30.0, answered=False)]),
    ):
        assert report.bars(worse).count("**Missed.**") == 1


def test_what_was_slow_while_the_host_took_the_processor_is_told_apart(found: Endured) -> None:
    """Of the twenty seconds from the 100th on it took half a core, and answers begun then or before it took 200 ms."""
    stolen = [(float(at), min(max(0.0, at - 100), 20.0) / 2) for at in range(600)]
    probed = [replace(each, seconds=0.2) if 99.9 <= each.at < 120 else each for each in found.probed]
    worse = replace(found, stolen=stolen, probed=probed)
    assert max(report.health_ms(worse)) == 200
    assert max(report.left_alone_ms(worse)) == 4
    assert len(report.left_alone_ms(worse)) == pytest.approx(580 * 10, abs=25)
    (row,) = [line for line in report.page(worse).splitlines() if "taken by the host" in line]
    assert row.split("|")[2].strip() == "2%"
