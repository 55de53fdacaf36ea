"""What a run shows while it runs."""

from __future__ import annotations

import io

from rich.console import Console

from batchwright.cli.progress import LogProgress, TerminalProgress, duration, progress_view
from batchwright.clock import ManualClock
from batchwright.jobs.run import RunProgress


def running(done: int, tokens: int) -> RunProgress:
    return RunProgress("running", 1000, done - 1, 1, resumed=100, running=8, generated_tokens=tokens)


def test_log_lines_at_each_phase_and_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), ManualClock()
    log = LogProgress(stream, clock)
    log(RunProgress("reading"))
    log(RunProgress("loading", 1000, 99, 1, resumed=100))
    for second in range(21):
        log(running(100 + 9 * second, 500 * second))
        clock.advance(1.0)
    others = "1 failed, 100 by earlier runs"
    assert stream.getvalue().splitlines() == [
        "batchwright: reading the input",
        f"batchwright: loading the model: 100 of 1,000 lines done, {others}",
        f"batchwright: running: 100 of 1,000 lines done, {others}",
        f"batchwright: running: 190 of 1,000 lines done, {others}, 8 being computed, 500 tokens/s, 1:30 left",
        f"batchwright: running: 280 of 1,000 lines done, {others}, 8 being computed, 500 tokens/s, 1:20 left",
    ]


def test_a_terminal_gets_one_live_line() -> None:
    stream, clock = io.StringIO(), ManualClock()
    console = Console(file=stream, force_terminal=True, width=150)
    with TerminalProgress(console, clock) as show:
        show(RunProgress("reading"))
        show(running(100, 0))
        clock.advance(10.0)
        show(running(200, 5000))
    assert (
        "200 of 1,000 lines done, 1 failed, 100 by earlier runs, 8 being computed, 500 tokens/s, 1:20 left"
        in stream.getvalue()
    )


def test_which_view() -> None:
    assert isinstance(progress_view(Console(force_terminal=True), quiet=False), TerminalProgress)
    assert isinstance(progress_view(Console(force_terminal=False), quiet=False), LogProgress)
    assert not isinstance(progress_view(Console(force_terminal=True), quiet=True), TerminalProgress)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 61, 3723)] == ["0:00", "1:01", "1:02:03"]
