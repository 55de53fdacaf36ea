"""Padded batches, and slots over steps."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pictures.drawing.style import BLUE, CYCLE, GREEN, GREY, INK, LIGHT, ORANGE, bare, figure, note
from pictures.scenes import shapes, tokens
from pictures.scenes.recording import Run

_GAP = 2.0
"""Between batches, in rows."""


def length_aware() -> Figure:
    drawn, (left, right) = figure(4.6, 1, 2, sharey=True, sharex=True)
    for axes, run, name in (
        (left, shapes.as_they_come(), "SimpleBatcher(model, 8)"),
        (right, shapes.length_aware(), "LengthAwareBatcher(model, max_batch_size=8)"),
    ):
        _padded(axes, run)
        seconds = run.stats.model_seconds * 1e3
        waste = 1 - run.stats.padding_efficiency
        axes.set_title(f"{name}\n{waste:.0%} padding, {seconds:.0f} ms in the model")
        axes.set_xlabel("tokens")
    left.set_ylabel("requests, batch by batch")
    return drawn


def continuous() -> Figure:
    whole, refilled = tokens.whole_batches(), tokens.continuous()
    drawn, (above, below) = figure(4.2, 2, sharex=True)
    _slots(above, whole.rows)
    above.set_title(f"whole batches, SimpleBatcher(model, 6): {len(whole.rows)} steps")
    _slots(below, refilled.rows)
    below.set_title(f"ContinuousBatcher(model, max_batch_size=6): {len(refilled.rows)} steps")
    below.set_xlabel("steps of the model")
    below.set_xlim(0, len(whole.rows))
    return drawn


def streaming() -> Figure:
    reading = tokens.streaming()
    drawn, (axes,) = figure(3.4)
    names = list(reading.begun)
    for row, name in enumerate(names):
        times = [moment * 1e3 for moment, request_id in reading.tokens if request_id == name]
        colour = ORANGE if len(times) == 60 else BLUE
        axes.plot([times[0] - tokens.STEP_SECONDS * 1e3, times[-1]], [row, row], color=LIGHT, lw=4, zorder=1)
        axes.plot(times, [row] * len(times), "|", color=colour, ms=7, mew=1.5, zorder=2)
    axes.set_yticks(range(len(names)), [f"request {number}" for number in range(1, len(names) + 1)], fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.set_xlim(0)
    axes.set_xlabel("milliseconds")
    axes.set_title("StreamingBatchProcessor(model, batch_size=4), each mark a token that is read")
    note(axes, "a long one holds nobody back", (1000, 1), (950, 3.2), ha="center")
    bare(axes)
    return drawn


def _padded(axes: Axes, run: Run) -> None:
    row = 0.0
    for batch in run.batches:
        lengths = [run.arrivals[number].length for number in batch.members]
        longest = max(lengths)
        axes.add_patch(
            Rectangle((0, row), longest, len(lengths), facecolor="white", edgecolor=GREY, hatch="////", lw=0)
        )
        for offset, length in enumerate(lengths):
            axes.add_patch(Rectangle((0, row + offset), length, 1, facecolor=BLUE, edgecolor="white", lw=0.5))
        axes.add_patch(Rectangle((0, row), longest, len(lengths), facecolor="none", edgecolor=INK, lw=0.9))
        row += len(lengths) + _GAP
    axes.set_xlim(0, 1.02 * max(arrival.length for arrival in run.arrivals))
    axes.set_ylim(row - _GAP + 0.3, -0.3)
    axes.set_yticks([])
    bare(axes)


def _slots(axes: Axes, rows: Sequence[Sequence[int | None]]) -> None:
    """A bar for each request from its first step to its last, in its slot."""
    slots = max(map(len, rows))
    axes.add_patch(Rectangle((0, -0.5), len(rows), slots, facecolor="white", edgecolor=GREY, hatch="////", lw=0))
    for slot in range(slots):
        held = [row[slot] if slot < len(row) else None for row in rows]
        begin = 0
        for step in range(1, len(held) + 1):
            if step == len(held) or held[step] != held[begin]:
                number = held[begin]
                if number is not None:
                    _bar(axes, number, slot, begin, step)
                begin = step
    axes.set_ylim(slots - 0.45, -0.55)
    axes.set_yticks([])
    axes.set_ylabel(f"{slots} slots")
    bare(axes)


def _bar(axes: Axes, number: int, slot: int, begin: int, end: int) -> None:
    colour = CYCLE[number % len(CYCLE)]
    axes.add_patch(Rectangle((begin, slot - 0.5), end - begin, 1, facecolor=colour, edgecolor="white", lw=1))
    ink = INK if colour in (ORANGE, GREEN) else "white"
    axes.text((begin + end) / 2, slot, str(number + 1), ha="center", va="center", color=ink, fontsize=8)
