"""Plots of simulations: service levels and times over the number of replicas, drawn by Vega-Lite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchwright.durable_files import replacing
from batchwright.errors import MissingExtra
from batchwright.simulation.outcome import Outcome

_WIDTH, _HEIGHT = 260, 200


def require_library() -> None:
    """Raise `MissingExtra` if what draws plots is not installed."""
    try:
        import vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra.of_report("a plot", error) from error


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw `outcomes` into an .svg file, or an .html file that needs no network. Raises `MissingExtra`, OSError."""
    require_library()
    import vl_convert

    spec = plots_of(outcomes)
    text = (
        vl_convert.vegalite_to_html(spec, bundle=True) if path.suffix == ".html" else vl_convert.vegalite_to_svg(spec)
    )
    with replacing(path) as file:
        file.write(text.encode())


def plots_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the plots as a specification of Vega-Lite; those of which there is nothing are left out."""
    shares = [
        {"replicas": each.replicas, "what": what, "share": share}
        for each in outcomes
        for what, share in (
            ("SLO met", each.slo_attainment),
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
    share = {"field": "share", "title": None, "axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    panels = [
        _panel("Shares", shares, share),
        _panel("Latency, ms", times, {"field": "ms", "title": None, "scale": {"type": "log"}}),
        _panel("Job, seconds", jobs, {"field": "s", "title": None}),
        _panel("Dollars for a million tokens", costs, {"field": "dollars", "title": None}),
    ]
    drawn = [panel for panel in panels if panel["data"]["values"]]
    return {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "concat": drawn, "columns": 2} | {
        "resolve": {"scale": {"color": "independent"}}
    }


def _panel(title: str, values: Sequence[dict[str, Any]], y: dict[str, Any]) -> dict[str, Any]:
    encoding: dict[str, Any] = {
        "x": {"field": "replicas", "type": "ordinal", "axis": {"labelAngle": 0}},
        "y": {"type": "quantitative"} | y,
    }
    if any("what" in each for each in values):
        named = {"field": "what", "type": "nominal", "title": None}
        encoding |= {"color": named, "shape": named}
    return {
        "title": title,
        "width": _WIDTH,
        "height": _HEIGHT,
        "data": {"values": list(values)},
        "mark": {"type": "line", "point": True},
        "encoding": encoding,
    }
