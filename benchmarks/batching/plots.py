"""The plots: SVG with the same bytes for the same figures, colours that the colour-blind can distinguish."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchmarks.batching.findings import LENGTHS, Cell, Findings, Goodput, Load
from benchmarks.batching.goodput import RATES
from benchmarks.batching.peers import GREEDY, OURS, SORTING, SYSTEMS, UNLIMITED, title

_WIDTH = 800 / 96
"""Inches, of 96 pixels."""


@dataclass(frozen=True, slots=True)
class _Style:
    colour: str
    marker: str
    line: Literal["-", "--"] = "-"
    width: float = 1.2


# The colours are those of Okabe and Ito; markers differ too. Ray Serve 2.47 performs like greedy: it is drawn wide, to
# be visible under it.
_STYLES = {
    OURS: _Style("#D55E00", "o", width=2.4),
    UNLIMITED: _Style("#D55E00", "o", "--", 1.6),
    GREEDY: _Style("#000000", "s", width=1.8),
    SORTING: _Style("#777777", "D"),
    "batched": _Style("#0072B2", "^"),
    "async_batcher": _Style("#56B4E9", "v"),
    "bentoml": _Style("#009E73", "P"),
    "ray247": _Style("#CC79A7", "X", width=3.6),
    "ray260": _Style("#E69F00", "<"),
}
_SETTINGS: Any = {"svg.hashsalt": "batchwright", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def plots(findings: Findings) -> Iterator[tuple[str, bytes]]:
    """`(name, SVG)` of each; the name begins with that of the section, and ends with the device's."""
    with mpl.rc_context(_SETTINGS):
        cells = [(cell, systems) for cell, systems in findings.by_cell(tuned=False)]
        for device in dict.fromkeys(cell.device for cell, _ in cells):
            yield f"goodput-{device}", _svg(_goodput(device, [pair for pair in cells if pair[0].device == device]))
        for section in ("loads", "faults"):
            chosen = findings.section(section)
            for device in dict.fromkeys(each.cell.device for each in chosen):
                yield f"{section}-{device}", _svg(_loads([each for each in chosen if each.cell.device == device]))


def _loads(loads: Sequence[Load]) -> Figure:
    """Share on time over the offered load, one panel for each distribution of lengths."""
    cells = list(dict.fromkeys(each.cell for each in loads))
    figure = Figure(figsize=(_WIDTH, 4.2), layout="constrained")
    panels = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    for panel, cell in zip(panels, cells, strict=True):
        _load_panel(panel, cell, [each for each in loads if each.cell == cell])
    panels[0].set_ylabel("answered right within 5x")
    _name(figure, [each.system for each in loads], f"Share in time over the offered load, {cells[0].device}")
    return figure


def _load_panel(panel: Axes, cell: Cell, loads: Sequence[Load]) -> None:
    for name in _drawn(each.system for each in loads):
        points = sorted((each.load, each.mean) for each in loads if each.system == name)
        style = _STYLES[name]
        panel.plot(
            [load for load, _ in points],
            [share for _, share in points],
            style.line,
            color=style.colour,
            marker=style.marker,
            markersize=3 + 1.5 * style.width,
            markerfacecolor=_fill(name),
            linewidth=style.width,
        )
    panel.axhline(0.99, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
    panel.set_title(f"{LENGTHS[cell.workload.lengths]} lengths", fontsize=10)
    panel.set_xlabel("offered load, of the capacity")
    panel.xaxis.set_major_formatter(PercentFormatter(1))
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    panel.set_ylim(-0.02, 1.03)
    panel.grid(alpha=0.25)


def _goodput(device: str, cells: Sequence[tuple[Cell, dict[str, Goodput]]]) -> Figure:
    """The highest rates: a row for each workload, a mark for each system."""
    figure = Figure(figsize=(_WIDTH, 1.7 + 0.45 * len(cells)), layout="constrained")
    panel = figure.subplots()
    for row, (_, systems) in enumerate(cells):
        names = _drawn(systems)
        for place, name in enumerate(names):
            style = _STYLES[name]
            panel.scatter(
                max(systems[name].mean, RATES[0]),
                row + 0.08 * ((len(names) - 1) / 2 - place),
                s=70 if name == OURS else 32,
                marker=style.marker,
                facecolors=_fill(name),
                edgecolors=style.colour,
                zorder=3,
            )
        panel.axhline(row + 0.5, color="#cccccc", linewidth=0.6)
    panel.set_xscale("log")
    panel.set_xlim(left=0.9 * RATES[0])
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    panel.set_xlabel("highest rate with 99% in time, as a share of the capacity (at the left edge: none)")
    panel.set_yticks(range(len(cells)), [cell.title for cell, _ in cells])
    panel.set_ylim(len(cells) - 0.5, -0.5)
    panel.grid(axis="x", alpha=0.25, which="both")
    _name(figure, [name for _, systems in cells for name in systems], f"Goodput as they come, {device}")
    return figure


def _fill(name: str) -> str:
    return "white" if name == UNLIMITED else _STYLES[name].colour


def _drawn(names: Iterator[str] | dict[str, Goodput] | Sequence[str]) -> list[str]:
    """Return the names to draw, ours last, on top."""
    there = set(names)
    return [name for name in reversed(SYSTEMS) if name in there]


def _name(figure: Figure, names: Sequence[str], heading: str) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=_STYLES[name].colour,
            marker=_STYLES[name].marker,
            linestyle=_STYLES[name].line,
            linewidth=_STYLES[name].width,
            markerfacecolor=_fill(name),
            label=title(name),
        )
        for name in reversed(_drawn(names))
    ]
    figure.suptitle(heading, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()
