"""Plots of simulations: service levels and times over the number of replicas, drawn by Vega-Lite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchwright.durable_files import replacing
from batchwright.jobs.report_page.frame import Chart, Spec, rendered, require_libraries, sized
from batchwright.simulation.outcome import Outcome

_WIDTH, _HEIGHT = 260, 200
_SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_OF_PAGE = ("width", "height", "autosize", "padding")
"""Properties of a plot that concern its place on a page."""


def require_library() -> None:
    """Raise `MissingExtra` if the library that draws plots is not installed."""
    require_libraries("a plot")


def draw(outcomes: Sequence[Outcome], path: Path, *, has_slo: bool) -> None:
    """Draw `outcomes` into an .svg file, or an .html file that needs no network. Raises `MissingExtra`, OSError.

    `has_slo`: whether online requests had goals to meet.
    """
    require_library()
    charts = charts_of(outcomes, has_slo=has_slo)
    with replacing(path) as file:
        file.write((page_of(charts) if path.suffix == ".html" else _picture(charts)).encode())


def page_of(charts: Sequence[Chart]) -> str:
    """Return the page of the plots."""
    return rendered("Simulation", charts)


def _picture(charts: Sequence[Chart]) -> str:
    import vl_convert

    panels = []
    for chart in charts:
        assert chart.spec is not None
        content = {name: value for name, value in chart.spec.items() if name not in _OF_PAGE}
        panel: Spec = {"title": chart.title, "width": _WIDTH, "height": _HEIGHT, **content}
        if chart.legend:
            named = {"field": "what", "type": "nominal", "title": None, "scale": {"domain": list(chart.legend)}}
            panel["encoding"] = panel["encoding"] | {"color": named, "shape": named}
        panels.append(panel)
    independent = {"scale": {"color": "independent", "shape": "independent"}}
    return str(vl_convert.vegalite_to_svg({"$schema": _SCHEMA, "concat": panels, "columns": 2, "resolve": independent}))


def charts_of(outcomes: Sequence[Outcome], *, has_slo: bool) -> list[Chart]:
    """Return the plots; those without data are left out."""
    shares = [
        {"replicas": each.replicas, "what": what, "share": share}
        for each in outcomes
        for what, share in (
            ("SLO met", each.slo_attainment if has_slo else None),
            ("busy", each.utilization),
            ("KV cache, peak", each.kv_peak),
        )
        if share is not None
    ]
    times = [
        {"replicas": each.replicas, "what": f"{name} {level}", "ms": getattr(found, level)}
        for each in outcomes
        for name, found in (("TTFT", each.ttft_ms), ("TPOT", each.tpot_ms))
        if found is not None
        for level in ("p50", "p99")
    ]
    jobs = [{"replicas": each.replicas, "s": each.job_seconds} for each in outcomes if each.job_seconds is not None]
    costs = [
        {"replicas": each.replicas, "dollars": each.cost_per_million_tokens}
        for each in outcomes
        if each.cost_per_million_tokens is not None
    ]
    share = {"field": "share", "axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    of_what = "time, KV cache, and online requests that met their goals" if has_slo else "time and KV cache"
    panels: list[tuple[str, str, Sequence[dict[str, Any]], Spec]] = [
        ("Shares", f"Of {of_what}.", shares, share),
        (
            "Latency, ms",
            "Of online requests: to the first token (TTFT), and for each after it (TPOT).",
            times,
            {"field": "ms", "scale": {"type": "log"}},
        ),
        ("Job, seconds", "Until its last line had ended.", jobs, {"field": "s"}),
        ("Dollars for a million tokens", "Of answers.", costs, {"field": "dollars"}),
    ]
    return [_chart(*panel) for panel in panels if panel[2]]


def _chart(title: str, about: str, values: Sequence[dict[str, Any]], y: dict[str, Any]) -> Chart:
    names = list(dict.fromkeys(each["what"] for each in values if "what" in each))
    encoding: Spec = {
        "x": {"field": "replicas", "type": "ordinal", "axis": {"labelAngle": 0}},
        "y": {"type": "quantitative", "title": None} | y,
        "tooltip": [{"field": name} for name in values[0]],
    }
    if names:
        scale = {"domain": names, "range": "category"}
        encoding["color"] = {"field": "what", "type": "nominal", "title": None, "scale": scale, "legend": None}
    mark = {"type": "line", "point": True}
    return Chart(
        title, about, sized({"data": {"values": list(values)}, "mark": mark, "encoding": encoding}), legend=names
    )
