"""One look for all pictures: 800 pixels wide, on white, in the colours of Okabe and Ito, which all can distinguish.

Nothing is shown by colour alone: what a colour means is also written, or shown by a shape.
"""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
GREY = "#707070"
LIGHT = "#D9D9D9"
INK = "#222222"

OF_REASON = {
    "full": BLUE,
    "idle": GREEN,
    "max_wait": ORANGE,
    "window": ORANGE,
    "deadline": RED,
    "drain": GREY,
}
CYCLE = (BLUE, ORANGE, GREEN)
"""For neighbours that are to be distinguished."""

_WIDTH_INCHES = 800 / 96

mpl.rcParams.update(
    {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "font.size": 9.5,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titlepad": 8,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
        "figure.facecolor": "white",
        "legend.frameon": False,
        "svg.hashsalt": "batchwright",
        "svg.fonttype": "none",
        "path.simplify": False,
    }
)


def figure(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure `height` inches high with its axes, row by row."""
    drawn, axes = plt.subplots(
        rows, columns, figsize=(_WIDTH_INCHES, height), squeeze=False, layout="constrained", **options
    )
    return drawn, list(axes.flat)


def bare(axes: Axes, *, left: bool = False) -> None:
    """Without a vertical axis; with `left`, only without its ticks."""
    axes.spines["left"].set_visible(left)
    axes.tick_params(axis="y", length=0)


def note(axes: Axes, text: str, at: tuple[float, float], text_at: tuple[float, float], **options: Any) -> None:
    """A remark with a thin line to what it is about, both in the units of `axes`."""
    axes.annotate(
        text,
        at,
        text_at,
        fontsize=9,
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.8, "shrinkA": 2, "shrinkB": 2},
        **options,
    )
