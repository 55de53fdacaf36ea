"""Requests that wait, and the batches in which they are computed, over time."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pictures.drawing.style import GREY, INK, LIGHT, OF_REASON, RED, bare, figure, note
from pictures.scenes import holding, several
from pictures.scenes.recording import Batch, Run

_LANE = 0.8
"""Height of a block, of the 1 that a lane has."""


def simple() -> Figure:
    drawn, waiting, model = _timeline(holding.simple())
    waiting.set_title("SimpleBatcher(model, batch_size=4, max_wait_ms=100)")
    note(waiting, "waits 100 ms although\nthe model is free", (375, 10), (300, 3.2), ha="center")
    note(waiting, "the fourth one fills the batch", (42, 3), (120, 1.8))
    model.set_xlim(0, 500)
    return drawn


def window() -> Figure:
    run = holding.window()
    drawn, waiting, model = _timeline(run)
    waiting.set_title("TimeBasedBatcher(model, window_ms=50)")
    for begin in _windows(run):
        for axes in (waiting, model):
            axes.axvspan(begin, begin + holding.WINDOW_SECONDS * 1e3, color=LIGHT, alpha=0.45, lw=0, zorder=0)
    note(waiting, "a window opens with its first request,\nand later ones do not move its end", (60, 0.5), (135, 0.5))
    model.set_xlim(0, 440)
    return drawn


def auto() -> Figure:
    drawn, waiting, model = _timeline(holding.auto())
    waiting.set_title('Batcher(model), which is policy="auto"')
    note(waiting, "the model is free: goes at once", (12, 0), (75, 0))
    note(waiting, "gather while the model is busy", (110, 6.6), (130, 6.6))
    model.set_xlim(0, 440)
    return drawn


def concurrent() -> Figure:
    drawn, waiting, model = _timeline(several.concurrent(), lanes=["1", "2", "3"])
    waiting.set_title("AsyncBatchProcessor(endpoint, AsyncBatchConfig(max_concurrent_batches=3, batch_size=8))")
    model.set_ylabel("batches\nin the model")
    model.set_xlim(0, 620)
    return drawn


def parallel() -> Figure:
    run = several.parallel()
    drawn, (axes,) = figure(3.0)
    _blocks(axes, run.batches, 1.0, reasons=False)
    begin, end = several.FAULT
    axes.add_patch(Rectangle((begin, 0.5), end - begin, 1, facecolor=LIGHT, alpha=0.6, lw=0, zorder=0))
    axes.text(end + 0.04, 1.4, "works again", va="center", fontsize=8.5)
    first, second = (batch.end for batch in run.batches if batch.error)
    axes.text(first + 0.5, 1, "taken out\nfor 1 s", ha="center", va="center", fontsize=8.5)
    axes.text(second + 0.9, 1, "taken out for 2 s", ha="center", va="center", fontsize=8.5)
    axes.set_yticks([0, 1, 2], ["replica 1", "replica 2", "replica 3\n(half as fast)"])
    axes.set_ylim(2.6, -0.55)
    axes.set_xlabel("seconds")
    axes.set_title("ParallelBatchProcessor([replica_1, replica_2, replica_3]), the second one failing for a while")
    axes.set_xlim(0, 7)
    bare(axes)
    return drawn


def _timeline(run: Run, lanes: Sequence[str] = ("model",)) -> tuple[Figure, Axes, Axes]:
    """Above, a line for each request from its arrival to its batch; below, the batches. In milliseconds."""
    scale = 1e3
    rows = len(run.arrivals)
    drawn, (waiting, model) = figure(
        1.6 + 0.11 * rows + 0.42 * len(lanes),
        2,
        sharex=True,
        height_ratios=[0.11 * rows, 0.42 * len(lanes) + 0.25],
    )
    for row, arrival in enumerate(run.arrivals):
        if arrival.started is not None:
            waiting.plot([arrival.at * scale, arrival.started * scale], [row, row], color=GREY, lw=1.2, zorder=2)
        waiting.plot(arrival.at * scale, row, marker="o", ms=4.5, color=INK, zorder=3)
    waiting.set_ylim(rows - 0.3, -0.7)
    waiting.set_yticks([])
    waiting.set_ylabel("requests:\n• arrives, - waits")
    waiting.tick_params(axis="x", length=0)
    waiting.spines["bottom"].set_visible(False)
    bare(waiting)
    _blocks(model, run.batches, scale, reasons=True)
    for batch in run.batches if len(lanes) == 1 else ():
        waiting.axvline(batch.start * scale, color=LIGHT, lw=0.8, zorder=1)
    model.set_yticks(range(len(lanes)), lanes)
    model.set_ylim(len(lanes) - 0.45, -0.55)
    model.set_xlabel("milliseconds")
    bare(model)
    return drawn, waiting, model


def _blocks(axes: Axes, batches: Sequence[Batch], scale: float, *, reasons: bool) -> None:
    """The batches, each with its number of requests, and with the reason of its dispatch."""
    size = 8.5 if reasons else 7.5
    for batch in batches:
        begin, width = batch.start * scale, (batch.end - batch.start) * scale
        failed = bool(batch.error)
        colour = "white" if failed else OF_REASON.get(batch.reason, OF_REASON["full"])
        axes.add_patch(
            Rectangle(
                (begin, batch.lane - _LANE / 2),
                width,
                _LANE,
                facecolor=colour,
                edgecolor=RED if failed else "white",
                lw=1.2 if failed else 0.8,
            )
        )
        text = "failed" if failed else f"{len(batch.members)}\n{batch.reason}" if reasons else str(len(batch.members))
        ink = RED if failed else "white" if colour != OF_REASON["max_wait"] else INK
        rotation = 90 if failed else 0
        axes.text(
            begin + width / 2, batch.lane, text, ha="center", va="center", color=ink, fontsize=size, rotation=rotation
        )
    axes.margins(x=0.01)


def _windows(run: Run) -> list[float]:
    """When windows opened, in milliseconds: with the first request after the end of the one before."""
    opened: list[float] = []
    for arrival in run.arrivals:
        if not opened or arrival.at >= opened[-1] + holding.WINDOW_SECONDS:
            opened.append(arrival.at)
    return [moment * 1e3 for moment in opened]
