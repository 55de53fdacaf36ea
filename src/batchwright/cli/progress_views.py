"""Views of the progress of a run: a live line on a terminal, and plain log lines elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.text import Text

from batchwright.cli.pacing_views import pacing_line
from batchwright.cli.quantities import counted, duration
from batchwright.cli.report_views import MESSAGE_SHOWN
from batchwright.cli.visible_text import visible
from batchwright.clock import Clock, MonotonicClock
from batchwright.inference.replicas.ray_opening import JOINED
from batchwright.lines.line_executor import LATEST
from batchwright.pricing.rates import money

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.job_run import RunProgress

_PHASES = {
    "reading": "reading the input",
    "loading": "loading the model",
    "connecting": "connecting to the endpoint",
    "running": "running",
    "stopping": "finishing the lines under way; Ctrl-C ends at once",
    "finishing": "finishing",
}
_SECONDS_BETWEEN_LOG_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2
_NUMBERS = re.compile(r"[\d,.]+")
_LEAST_LEFT = 0.5
"""Least seconds left that are shown: if a shorter forecast persists, the last lines are waiting for something."""
_SHORTEST_RATE = 1.0
"""Seconds of running after which a rate means something."""


@contextmanager
def progress_view(console: Console, *, quiet: bool) -> Iterator[Callable[[RunProgress], None]]:
    """Show the progress that the yielded function is called with, in a way that fits what `console` writes to."""
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        view = TerminalProgress(console)
        with view.bar:
            yield view
    else:
        yield LogProgress(sys.stderr)


class ThroughputMeter:
    """Speed of a run, without the lines that earlier runs answered."""

    def __init__(self) -> None:
        self._started: float | None = None

    def of(self, progress: RunProgress, now: float) -> float:
        """Return generated tokens per second; 0 while they are not known."""
        if progress.phase != "running":
            return 0.0
        if self._started is None:
            self._started = now
        elapsed = now - self._started
        return progress.generated_tokens / elapsed if elapsed >= _SHORTEST_RATE else 0.0


class FirstFailure:
    """The first failure of a run, shown once, when it happens: all lines may well fail like this."""

    def __init__(self) -> None:
        self._is_shown = False

    def of(self, progress: RunProgress) -> str | None:
        """Return the text about it once, when there is one."""
        failure = progress.first_failure
        if self._is_shown or failure is None:
            return None
        self._is_shown = True
        message = " ".join(failure.message.split())[:MESSAGE_SHOWN]
        return visible(f"line {failure.line:,} ({failure.custom_id}) failed: {failure.code}: {message}")


class LogProgress:
    """Progress as log lines: one at each phase and for each new kind of waiting, and one every ten seconds."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream = stream
        self._clock = clock or MonotonicClock()
        self._rates = ThroughputMeter()
        self._first_failure = FirstFailure()
        self._shown: tuple[str, str | None] = ("", None)
        self._printed: set[str] = set()
        """What lines were said to wait for."""
        self._last = 0.0

    def __call__(self, progress: RunProgress) -> None:
        now = self._clock.now()
        rate = self._rates.of(progress, now)
        if (failure := self._first_failure.of(progress)) is not None:
            print(f"batchwright: {failure}", file=self._stream, flush=True)
        # Numbers, such as the seconds until a provider is tried again, and single errors change all the time.
        waiting = _NUMBERS.sub("", (progress.waiting or "").partition(LATEST)[0])
        shown = progress.phase, progress.detail
        is_news = bool(waiting) and waiting not in self._printed
        if shown == self._shown and not is_news and now - self._last < _SECONDS_BETWEEN_LOG_LINES:
            return
        self._shown, self._last = shown, now
        self._printed.add(waiting)
        print(
            f"batchwright: {_PHASES[progress.phase]}{visible(_standing(progress, rate))}", file=self._stream, flush=True
        )


def _standing(progress: RunProgress, rate: float) -> str:
    if progress.detail is not None:
        return f": {progress.detail}"
    if not progress.total:
        return ""
    parts = [f"{progress.done:,} of {counted(progress.total, 'line')} done"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.resumed:
        parts.append(f"{progress.resumed:,} by earlier runs")
    if rate:
        if not progress.pacing:  # which says how many are at the endpoint
            parts.append(f"{progress.running:,} being computed")
        parts.append(f"{rate:,.0f} tokens/s")
    if (bounds := pacing_line(progress.pacing)) is not None:
        parts.append(bounds)
    parts += _cost(progress)
    if progress.seconds_left is not None and progress.seconds_left >= _LEAST_LEFT:
        parts.append(f"{duration(progress.seconds_left)} left{_interval(progress.seconds_left_between)}")
    if progress.waiting is not None:
        parts.append(f"waiting: {progress.waiting}")
    return ": " + ", ".join(parts)


def _cost(progress: RunProgress) -> list[str]:
    """What the job has cost so far, and for how many lines the budget is enough."""
    parts = []
    if progress.cost is not None and (progress.cost or progress.unknown_requests or progress.budget is not None):
        cost = money(progress.cost) + ("" if progress.budget is None else f" of {money(progress.budget)}")
        if progress.unknown_requests:
            cost += f" and {counted(progress.unknown_requests, 'request')} of unknown cost"
        parts.append(cost)
    if progress.budget_covers is not None:
        parts.append(f"which is enough for about {counted(progress.budget_covers, 'line')}")
    return parts


def _interval(between: tuple[float, float] | None) -> str:
    """Return the interval around the time left, unless it says no more than the time itself."""
    if between is None:
        return ""
    low, high = map(duration, between)
    return "" if low == high else f" ({low} to {high})"


class TerminalProgress:
    """Progress as a bar with a line of figures below it, drawn a few times a second within `with view.bar`."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._clock = clock or MonotonicClock()
        self._rates = ThroughputMeter()
        self._first_failure = FirstFailure()
        self._last = -_SECONDS_BETWEEN_DRAWINGS
        self._drawn: tuple[str, str | None] = ("", None)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[share]}")
        self._progress = Progress(*columns, console=console)
        self._standing = Text("", style="dim")
        # Figures that do not fit on one line continue on the next, however narrow the terminal is.
        self.bar = Live(Group(self._progress, self._standing), console=console, transient=True, refresh_per_second=8)
        self._task = self._progress.add_task("", total=None, share="")
        self._kept: str | None = None
        """What was said about the cluster, which stays on the screen."""

    def __call__(self, progress: RunProgress) -> None:
        now = self._clock.now()
        rate = self._rates.of(progress, now)
        if (failure := self._first_failure.of(progress)) is not None:
            self.bar.console.print(Text(failure))
        if progress.detail != self._kept and (progress.detail or "").startswith(JOINED):
            self._kept = progress.detail
            self.bar.console.print(Text(f"batchwright: {self._kept}"))
        drawn = progress.phase, progress.detail
        if drawn == self._drawn and now - self._last < _SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn, self._last = drawn, now
        is_running = progress.phase == "running"
        fraction = self._fraction(progress)
        self._progress.update(
            self._task,
            description=_PHASES[progress.phase],
            total=1.0 if is_running else None,
            completed=fraction if is_running else 0.0,
            share=f"{fraction:.0%}" if is_running else "",
        )
        self._standing.plain = visible(_standing(progress, rate)).removeprefix(": ")

    @staticmethod
    def _fraction(progress: RunProgress) -> float:
        """The share of the bar that is full: by lines of earlier runs, and by the work of this one."""
        before = progress.resumed / progress.total if progress.total else 0.0
        if progress.fraction is None:
            return progress.done / progress.total if progress.total else 0.0
        return before + (1.0 - before) * progress.fraction
