"""How a run shows where it stands: a live line on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from batchwright.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.run import RunProgress

_PHASES = {
    "reading": "reading the input",
    "loading": "loading the model",
    "running": "running",
    "finishing": "finishing",
}
_SECONDS_BETWEEN_LOG_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2
_SHORTEST_RATE = 1.0
"""Seconds of running before a rate means anything."""


class ProgressView(AbstractContextManager["ProgressView"]):
    """Shows nothing. Others show what they are called with."""

    def __call__(self, progress: RunProgress) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def progress_view(console: Console, *, quiet: bool) -> ProgressView:
    """The view that fits what `console` writes to."""
    if quiet:
        return ProgressView()
    return TerminalProgress(console) if console.is_terminal else LogProgress(sys.stderr)


class ThroughputMeter:
    """Speed and remaining time of a run, from what this run itself did."""

    def __init__(self) -> None:
        self._started: float | None = None

    def of(self, progress: RunProgress, now: float) -> tuple[float, float | None]:
        """`(tokens/s generated, seconds left)`; None while that cannot be told."""
        if progress.phase != "running":
            return 0.0, None
        if self._started is None:
            self._started = now
        elapsed = now - self._started
        if elapsed < _SHORTEST_RATE:
            return 0.0, None
        done_now = progress.done - progress.resumed
        left = progress.total - progress.done
        return progress.generated_tokens / elapsed, left * elapsed / done_now if done_now else None


class LogProgress(ProgressView):
    """A line at each phase, and every ten seconds while running."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream = stream
        self._clock = clock or MonotonicClock()
        self._rates = ThroughputMeter()
        self._shown: tuple[str, str | None] = ("", None)
        self._last = 0.0

    def __call__(self, progress: RunProgress) -> None:
        now = self._clock.now()
        rate, left = self._rates.of(progress, now)
        shown = progress.phase, progress.waiting
        if shown == self._shown and now - self._last < _SECONDS_BETWEEN_LOG_LINES:
            return
        self._shown, self._last = shown, now
        print(f"batchwright: {_PHASES[progress.phase]}{_standing(progress, rate, left)}", file=self._stream, flush=True)


def _standing(progress: RunProgress, rate: float, left: float | None) -> str:
    if not progress.total:
        return ""
    parts = [f"{progress.done:,} of {progress.total:,} lines done"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.resumed:
        parts.append(f"{progress.resumed:,} by earlier runs")
    if rate:
        parts.append(f"{progress.running:,} being computed")
        parts.append(f"{rate:,.0f} tokens/s")
    if left is not None:
        parts.append(f"{duration(left)} left")
    if progress.waiting is not None:
        parts.append(f"waiting: {progress.waiting}")
    return ": " + ", ".join(parts)


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class TerminalProgress(ProgressView):
    """One live line, drawn a few times a second."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._clock = clock or MonotonicClock()
        self._rates = ThroughputMeter()
        self._last = -_SECONDS_BETWEEN_DRAWINGS
        self._phase = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[standing]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, standing="")

    def __enter__(self) -> TerminalProgress:
        self._progress.start()
        return self

    def __call__(self, progress: RunProgress) -> None:
        now = self._clock.now()
        rate, left = self._rates.of(progress, now)
        if progress.phase == self._phase and now - self._last < _SECONDS_BETWEEN_DRAWINGS:
            return
        self._phase, self._last = progress.phase, now
        self._progress.update(
            self._task,
            description=_PHASES[progress.phase],
            total=progress.total or None,
            completed=progress.done,
            standing=_standing(progress, rate, left).removeprefix(": "),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
