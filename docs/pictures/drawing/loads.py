"""How batchers fare under a burst, an overload, and a lack of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pictures.drawing.style import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, RED, figure, note
from pictures.scenes import load, shapes
from pictures.scenes.recording import Run


def adaptive() -> Figure:
    run = load.adaptive()
    drawn, (sizes, latencies) = figure(4.4, 2, sharex=True)
    for axes in (sizes, latencies):
        axes.axvspan(*load.BURST, color=LIGHT, alpha=0.45, lw=0, zorder=0)
    sizes.plot([b.start for b in run.batches], [len(b.members) for b in run.batches], ".", color=BLUE, ms=5)
    sizes.set_ylabel("requests\nin a batch")
    sizes.set_ylim(0, 38)
    sizes.text(sum(load.BURST) / 2, 36, "four times the load", ha="center", va="center", fontsize=9)
    sizes.set_title("AdaptiveBatcher(model, target_latency_ms=100)")
    answered = [(a.at, (a.answered - a.at) * 1e3) for a in run.arrivals if a.answered is not None]
    _dots(latencies, answered, GREY)
    latencies.axhline(load.TARGET_SECONDS * 1e3, color=RED, lw=1.2)
    latencies.text(6.05, load.TARGET_SECONDS * 1e3, "target", color=RED, va="center", fontsize=9)
    latencies.set_ylabel("latency of a\nrequest, ms")
    latencies.set_xlabel("seconds")
    latencies.set_xlim(0, 6)
    latencies.set_ylim(0)
    return drawn


def priority() -> Figure:
    run = load.priority()
    drawn, (axes,) = figure(3.4)
    for level, colour, marker in ((0, BLUE, "s"), (5, ORANGE, "o"), (7, GREEN, "^")):
        waits = [(a.at, a.started - a.at) for a in run.arrivals if a.priority == level and a.started is not None]
        axes.plot(
            *zip(*waits, strict=True), marker, color=colour, ms=3.5, lw=0, label=f"priority {level}", markeredgewidth=0
        )
    note(axes, "goes with the fives that come 20 s later", (33, 25.3), (26, 16), ha="center")
    axes.set_xlim(0, 62)
    axes.set_ylim(-0.8, 29.5)
    axes.set_xlabel("arrival, seconds")
    axes.set_ylabel("waited, seconds")
    axes.set_title("PriorityBatcher(model), with a fifth more work than the model can do")
    axes.legend(loc="upper left", markerscale=1.6, handletextpad=0.1)
    return drawn


def fair() -> Figure:
    drawn, (first, shared) = figure(3.2, 1, 2, sharey=True)
    first.set_title("first come, first served")
    shared.set_title("order=FairShare()")
    first.set_ylabel("tokens computed")
    for axes, run in ((first, load.first_come()), (shared, load.fair())):
        _tokens_of(axes, run, "A", BLUE, "-")
        _tokens_of(axes, run, "B", RED, "--")
        axes.axvline(load.SECOND_TENANT_COMES, color=GREY, lw=0.8, zorder=0)
        axes.text(load.SECOND_TENANT_COMES - 0.3, 15_200, "B comes", ha="right", va="center", fontsize=9)
        axes.set_xlabel("seconds")
        axes.set_xlim(0, 27.5)
        axes.set_ylim(0, 17_500)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return drawn


def memory() -> Figure:
    run = shapes.memory()
    drawn, (axes,) = figure(3.4)
    mb = [(b.start, sum(run.arrivals[m].length + 1 for m in b.members), b.error) for b in run.batches]
    axes.step(
        [b.start for b in run.batches], [b.limit_mb or 0.0 for b in run.batches], where="post", color=BLUE, lw=1.5
    )
    axes.plot([t for t, _, error in mb if not error], [m for _, m, error in mb if not error], ".", color=GREY, ms=4)
    axes.plot([t for t, _, error in mb if error], [m for _, m, error in mb if error], "x", color=RED, ms=8, mew=2)
    begin, end = shapes.SHORTAGE
    axes.axvspan(begin, end, color=LIGHT, alpha=0.45, lw=0, zorder=0)
    axes.plot([begin, end], [shapes.MB_LEFT] * 2, color=INK, lw=1, ls="--")
    axes.text((begin + end) / 2, 30, "another program\ntakes 320 MB", ha="center", va="bottom", fontsize=9)
    axes.text(begin - 0.2, shapes.MB_LEFT, "what is left", ha="right", va="center", fontsize=9)
    note(axes, "limit in use", (22, 742), (23.5, 860), color=BLUE)
    note(axes, "out of memory", (6.3, 765), (8, 880), color=RED)
    note(axes, "batches", (17, 607), (18.5, 480), color=GREY)
    axes.set_ylim(0, 930)
    axes.set_xlim(0, 36)
    axes.set_xlabel("seconds")
    axes.set_ylabel("estimated MB of a batch")
    axes.set_title("MemoryEfficientBatcher(model, max_memory_mb=800, tokens_per_mb=1)")
    return drawn


def _dots(axes: Axes, points: Sequence[tuple[float, float]], colour: str) -> None:
    """Many small dots. As lines without a length they take a quarter of the bytes of markers."""
    across = [value for x, _ in points for value in (x, x, math.nan)]
    up = [value for _, y in points for value in (y, y, math.nan)]
    axes.plot(across, up, color=colour, lw=2.2, solid_capstyle="round")


def _tokens_of(axes: Axes, run: Run, tenant: str, colour: str, line: str) -> None:
    ended = [
        (b.end, sum(run.arrivals[m].length for m in b.members if run.arrivals[m].tenant == tenant)) for b in run.batches
    ]
    times, tokens = [0.0, *(end for end, _ in ended)], [0, *accumulate(number for _, number in ended)]
    axes.plot(times, tokens, color=colour, ls=line, lw=2)
    last = next(index for index, number in enumerate(tokens) if number == tokens[-1])
    axes.text(times[last] - 0.5, tokens[last] + 500, tenant, ha="center", va="bottom", color=colour, weight="bold")
