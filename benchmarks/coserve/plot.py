"""The plot: the distribution of the times, and the engine's rate meanwhile. The same bytes for the same figures."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from benchmarks.coserve.report import Findings
from benchmarks.coserve.run import Outcome

_WIDTH = 1000 / 96
"""Inches, of 96 pixels."""
# The colours are those of Okabe and Ito; the lines differ too.
_STYLES = (("#000000", "-"), ("#D55E00", "-"), ("#0072B2", "--"), ("#777777", ":"))
_ONLINE, _BATCH = "#56B4E9", "#E69F00"
_SETTINGS: Any = {"svg.hashsalt": "batchwright", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw(findings: Findings) -> bytes:
    """The picture as SVG."""
    runs = [("online alone", findings.alone), *((name, outcome) for name, _, outcome in findings.together)]
    slo = findings.together[0][1]
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
        first, next_, made = figure.subplots(1, 3)
        _distribution(first, runs, "ttft_ms", slo.ttft_ms, "time to first token, ms")
        _distribution(next_, runs, "tpot_ms", slo.tpot_ms, "time per output token, ms")
        first.set_ylabel("share of the online requests")
        _tokens(made, runs, findings.job_alone.batch_rate)
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()


def _distribution(panel: Axes, runs: list[tuple[str, Outcome]], name: str, bound: float, label: str) -> None:
    for (title, outcome), (colour, line) in zip(runs, _STYLES, strict=False):
        values = np.sort([getattr(each, name) for each in outcome.served])
        shares = np.arange(1, len(values) + 1) / len(values)
        panel.plot(values, shares, line, color=colour, label=title, linewidth=1.6)
    panel.axvline(bound, color="#CC79A7", linewidth=1)
    panel.annotate("SLO", (bound, 0.02), xytext=(3, 0), textcoords="offset points", color="#CC79A7")
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_ylim(0, 1.02)
    panel.set_xlabel(label)


def _tokens(panel: Axes, runs: list[tuple[str, Outcome]], most: float) -> None:
    places = range(len(runs))
    online = [outcome.online_rate for _, outcome in runs]
    batch = [outcome.batch_rate for _, outcome in runs]
    panel.barh(places, online, color=_ONLINE, label="online")
    panel.barh(places, batch, left=online, color=_BATCH, label="batch")
    panel.axvline(most, color="#000000", linewidth=1)
    panel.annotate("the job alone", (most, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom")
    panel.set_yticks(places, [title.replace(", ", ",\n") for title, _ in runs])
    panel.invert_yaxis()
    panel.set_xlabel("generated tokens/s")
    panel.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.95, 1.0))
