"""The plots of the page, as specifications of Vega-Lite. Pure.

Names of runs are only ever data in them, never part of an expression or a field's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from batchwright.jobs.report_page.curves import Curve, count, foreseen_end, level, quotient, rate, share_so_far
from batchwright.jobs.report_page.frame import Chart, Spec, sized
from batchwright.jobs.report_page.reading import Report
from batchwright.planning.bound import PART_NAMES

_BAR = 34
_LEAST_MEASURING = 0.1
"""Seconds of measuring the rates of the machine that are shown."""
_LEAST_REST = 0.01
"""Share of the whole time without a part of its own that is shown."""


@dataclass(frozen=True, slots=True)
class Run:
    """A report with the name of its run on the page."""

    name: str
    report: Report


@dataclass(frozen=True, slots=True)
class _Line:
    """What a plot over time shows of each run."""

    title: str
    about: str
    missing: str
    curve: Callable[[Report], Curve]
    format: str = ",.2~f"
    top: Callable[[Report], float | None] = lambda report: None
    """A height that is marked by a broken line of the run."""
    is_share: bool = False
    """Whether it may reach 1 and no more."""
    of_endpoint: bool = False
    """Whether only runs with an endpoint have it."""


def _foreseen_end(report: Report) -> Curve:
    return foreseen_end(report.series)


_NO_ENGINE = "the engine was elsewhere, or the report is of an earlier version"
_LINES = (
    _Line(
        "Answers: tokens per second",
        "Tokens of answers generated; with an endpoint, of lines as they end.",
        "no tokens of answers were counted over time",
        lambda report: rate(report.series, "generated_tokens") if report.generated_tokens else [],
    ),
    _Line(
        "Prompts: tokens per second",
        "Prompt tokens computed, or with an endpoint sent; those found in the cache cost nothing.",
        "no prompt tokens were counted over time",
        lambda report: rate(
            report.series, "computed_prompt_tokens" if "computed_prompt_tokens" in report.series else "prompt_tokens"
        ),
    ),
    _Line(
        "Occupancy",
        "Sequences in a step; the broken line is how many there may be.",
        _NO_ENGINE,
        lambda report: quotient(report.series, "sequences", "steps"),
        ",.0f",
        lambda report: report.max_num_seqs or None,
    ),
    _Line(
        "KV cache",
        "Blocks in use, as a share of all.",
        _NO_ENGINE,
        lambda report: level(report.series, "kv_blocks", 1 / report.kv_blocks) if report.kv_blocks else [],
        ".2~p",
    ),
    _Line(
        "Reuse of prompts",
        "Share of the prompt tokens of the lines so far that were found in a cache.",
        "no prompt tokens were counted over time",
        lambda report: share_so_far(report.series, "cached_tokens", "prompt_tokens"),
        ".0%",
        is_share=True,
    ),
    _Line(
        "Lines ended",
        "Share of the lines of the input, those of earlier runs included.",
        "the report has no figures over time: runs of this version write them",
        lambda report: [
            (at, (report.resumed + lines) / max(1, report.total)) for at, lines in count(report.series, "lines")
        ],
        ".0%",
        is_share=True,
    ),
    _Line(
        "Forecast of the end",
        "The whole time as it was foreseen at each moment; the broken line is when the run ended.",
        "the run was over before there was a forecast",
        _foreseen_end,
        ",.0f",
    ),
    _Line(
        "Requests per second",
        "Sent to the endpoint, tries that failed included.",
        "the lines were computed here",
        lambda report: rate(report.series, "sent"),
        ",.2~f",
        of_endpoint=True,
    ),
    _Line(
        "Refused requests",
        "Refused by the endpoint for a limit (429), so far.",
        "the lines were computed here",
        lambda report: count(report.series, "refused"),
        ",.0f",
        of_endpoint=True,
    ),
    _Line(
        "Cost",
        "Dollars that the answers of this run cost so far.",
        "no prices are known",
        lambda report: count(report.series, "cost"),
        "$,.5~r",
        of_endpoint=True,
    ),
)


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """Return all plots, those of which no run has anything without a specification."""
    return [
        _time_chart(runs),
        *(_over_time(line, runs) for line in _LINES),
        _lengths_chart(runs),
        _pairs_chart(runs),
    ]


def _over_time(line: _Line, runs: Sequence[Run]) -> Chart:
    found = [(run, curve) for run in runs if (curve := line.curve(run.report))]
    if not found:
        concerns = not line.of_endpoint or any(run.report.pacing for run in runs)
        return Chart(line.title, line.about, None, line.missing if concerns else "")
    longest = max(run.report.series["seconds"][-1] or 0.0 for run, _ in found)
    unit, of_unit = _unit(longest)
    is_time = line.curve is _foreseen_end
    by = of_unit if is_time else 1.0
    values: list[Spec] = [
        {"at": _short(at / of_unit), "value": _short(value / by), "run": run.name}
        for run, curve in found
        for at, value in curve
    ]
    tops: list[Spec] = [
        {"top": _short(top / by), "run": run.name}
        for run, _ in found
        if (top := run.report.series["seconds"][-1] if is_time else line.top(run.report))
    ]
    x = {"field": "at", "type": "quantitative", "title": unit, "scale": {"domain": [0, _short(longest / of_unit)]}}
    y: Spec = {"field": "value", "type": "quantitative", "title": unit if is_time else None}
    shown_as = ",.1~f" if by > 1.0 else line.format
    is_whole = shown_as == ",.0f"
    highest: float = max([*(each["value"] for each in values), *(each["top"] for each in tops)])
    y["axis"] = _whole_axis(highest, shown_as) if is_whole else {"format": shown_as}
    is_small = highest < 1 if is_whole else highest <= 0
    y["scale"] = {"domainMin": 0} | ({"domainMax": 1} if line.is_share or is_small else {})
    hover = {
        "name": "hover",
        "select": {"type": "point", "nearest": True, "on": "pointerover", "clear": "pointerout", "encodings": ["x"]},
    }
    tooltip: list[Spec] = [{"field": "run", "title": "run"}] if len(runs) > 1 else []
    tooltip += [
        {"field": "at", "type": "quantitative", "title": unit, "format": ",.4~g"},
        {"field": "value", "type": "quantitative", "title": line.title.lower(), "format": shown_as},
    ]
    layers: list[Spec] = [
        {"mark": {"type": "line", "strokeWidth": 1.75, "interpolate": "linear"}},
        {
            "mark": {"type": "point", "filled": True, "size": 46},
            "params": [hover],
            "encoding": {
                "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
                "tooltip": tooltip,
            },
        },
    ]
    spec = sized({"encoding": {"x": x, "y": y, "color": _color(runs)}, "layer": layers})
    spec["data"] = {"values": values}
    if tops:
        rule = {"mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.25}, "data": {"values": tops}}
        spec["layer"].insert(0, rule | {"encoding": {"x": None, "y": {"field": "top", "type": "quantitative"}}})
    return Chart(line.title, line.about, spec)


def _time_chart(runs: Sequence[Run]) -> Chart:
    title, about = "Where the time went", "Of the whole run, from its start to its report."
    parts = [(run, _parts(run.report)) for run in runs]
    order = list(dict.fromkeys(name for _, each in parts for name, seconds in each if seconds > 0))
    if not order:
        return Chart(title, about, None, "nothing was computed", wide=True)
    unit, of_unit = _unit(max(sum(seconds for _, seconds in each) for _, each in parts))
    values = [
        {"run": run.name, "part": name, "order": order.index(name), "time": _short(seconds / of_unit)}
        for run, each in parts
        for name, seconds in each
        if seconds > 0
    ]
    names = [run.name for run in runs]
    y: Spec = {"field": "run", "type": "nominal", "sort": names, "title": None}
    y["axis"] = None if len(runs) == 1 else {"labelLimit": 110, "ticks": False, "domain": False}
    scale = {"domain": order, "range": "category"}
    bar: Spec = {
        "mark": {"type": "bar", "height": 20},
        "encoding": {
            "x": {
                "field": "time",
                "type": "quantitative",
                "title": unit,
                "stack": "zero",
                "axis": {"format": ",.3~g"},
                "scale": {"nice": False},
            },
            "color": {"field": "part", "type": "nominal", "scale": scale, "legend": None},
            "order": {"field": "order"},
            "tooltip": [
                *([{"field": "run", "title": "run"}] if len(runs) > 1 else []),
                {"field": "part", "title": "part"},
                {"field": "time", "type": "quantitative", "title": unit, "format": ",.4~g"},
            ],
        },
        "data": {"values": values},
    }
    layers = [bar]
    bounds = [
        {"run": run.name, "bound": _short((_before_lines(run.report) + run.report.bound_seconds) / of_unit)}
        for run in runs
        if run.report.bound_seconds is not None
    ]
    if bounds:
        about += " The mark is the bound: what this machine needs at least for what was computed."
        tick = {"type": "tick", "thickness": 3, "size": 30, "color": {"expr": "ink"}}
        layers.append(
            {"mark": tick, "data": {"values": bounds}, "encoding": {"x": {"field": "bound", "type": "quantitative"}}}
        )
    spec = sized({"encoding": {"y": y}, "layer": layers}, height=_BAR * len(runs))
    return Chart(title, about, spec, wide=True, legend=order)


def words_of(part: str) -> str:
    """Return what a part of the time is called; a report of another version may have others."""
    return PART_NAMES.get(part, part.replace("_", " "))


def is_long(report: Report) -> bool:
    """Whether measuring the rates of the machine took so long that it is shown, and not only looking them up."""
    return (report.rates_seconds or 0.0) >= _LEAST_MEASURING


def _before_lines(report: Report) -> float:
    """The seconds that are shown before those of the lines."""
    return (report.load_seconds or 0.0) + ((report.rates_seconds or 0.0) if is_long(report) else 0.0)


def _parts(report: Report) -> list[tuple[str, float]]:
    """The parts of the time of a run, by name, in seconds, that of which no more is known last."""
    parts = [("loading the model" if report.has_engine else "before the first line", report.load_seconds or 0.0)]
    if is_long(report):
        parts.append(("measuring the machine", report.rates_seconds or 0.0))
    parts += _parts_of_loop(report)
    whole = report.wall_seconds or 0.0
    rest = whole - sum(seconds for _, seconds in parts)
    return [*parts, ("reading the input and closing", rest)] if rest >= _LEAST_REST * whole > 0 else parts


def _parts_of_loop(report: Report) -> list[tuple[str, float]]:
    """The parts of the time from the first line to the last."""
    loop = report.loop_seconds or 0.0
    if report.bound is not None and report.bound.time:
        return [(words_of(name), share * loop) for name, share in report.bound.time.items()]
    if not report.has_engine:
        return [("at work", loop)]
    # Seconds of several engines, or of an earlier use of this one, count as shares.
    outside = min(loop, report.outside_model_seconds or 0.0)
    prefill, decode = report.prefill_seconds or 0.0, report.decode_seconds or 0.0
    if not prefill + decode:
        return [("model", loop - outside), ("outside the model", outside)]
    of_prompts = prefill / (prefill + decode) * (loop - outside)
    return [
        ("model: prompts", of_prompts),
        ("model: answers", loop - outside - of_prompts),
        ("outside the model", outside),
    ]


def _lengths_chart(runs: Sequence[Run]) -> Chart:
    title = "Lengths of answers"
    found = [run for run in runs if sum(run.report.lengths.ended) + sum(run.report.lengths.cut)]
    if not found:
        return Chart(title, "", None, "no answer has ended, or the report is of an earlier version")
    if len(runs) > 1:
        return _lengths_of_several(title, runs, found)
    lengths = found[0].report.lengths
    ends = ["ended by themselves", "ended by their limit"]
    values = [
        {"from": bar * lengths.width, "to": (bar + 1) * lengths.width, "answers": number, "end": end, "order": order}
        for order, (end, bars) in enumerate(zip(ends, (lengths.ended, lengths.cut), strict=True))
        for bar, number in enumerate(bars)
        if number
    ]
    scale = {"domain": ends, "range": "category"}
    most = max(sum(both) for both in zip_longest(lengths.ended, lengths.cut, fillvalue=0))
    whole = _whole_axis(most, ",d")
    bars = {
        "mark": {"type": "bar", "binSpacing": 1},
        "data": {"values": values},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "bin": {"binned": True},
                "title": "tokens",
                "scale": {"zero": True},
            },
            "x2": {"field": "to"},
            "y": {"field": "answers", "type": "quantitative", "stack": "zero", "title": None, "axis": whole},
            "color": {"field": "end", "type": "nominal", "scale": scale, "legend": None},
            "order": {"field": "order"},
            "tooltip": [
                {"field": "from", "title": "tokens, from"},
                {"field": "to", "title": "to, less than"},
                {"field": "answers", "title": "answers"},
                {"field": "end", "title": "they"},
            ],
        },
    }
    about = "Answers by their tokens."
    layers: list[Spec] = [bars]
    if lengths.mean is not None:
        about += f" The broken line is the mean, {lengths.mean:,.0f}."
        rule = {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "color": {"expr": "ink"}}
        encoding = {"x": {"field": "mean", "type": "quantitative"}}
        layers.append({"mark": rule, "data": {"values": [{"mean": lengths.mean}]}, "encoding": encoding})
    return Chart(title, about, sized({"layer": layers}), legend=ends)


def _lengths_of_several(title: str, runs: Sequence[Run], found: Sequence[Run]) -> Chart:
    values = []
    for run in found:
        lengths = run.report.lengths
        both = [ended + cut for ended, cut in zip(lengths.ended, lengths.cut, strict=False)]
        total, so_far = max(1, sum(both)), 0
        values.append({"tokens": 0, "share": 0.0, "run": run.name})
        for bar, number in enumerate(both):
            so_far += number
            values.append({"tokens": (bar + 1) * lengths.width, "share": _short(so_far / total), "run": run.name})
    spec: Spec = {
        "mark": {"type": "line", "interpolate": "step-before", "strokeWidth": 1.75},
        "encoding": {
            "x": {"field": "tokens", "type": "quantitative", "title": "tokens", "axis": {"grid": False}},
            "y": {"field": "share", "type": "quantitative", "title": None, "axis": {"format": ".0%"}},
            "color": _color(runs),
        },
        "data": {"values": values},
    }
    return Chart(title, "Share of the answers that have at most so many tokens.", sized(spec))


def _pairs_chart(runs: Sequence[Run]) -> Chart:
    title = "Lengths, expected and real"
    pairs = [(run.name, *pair) for run in runs for pair in run.report.lengths.pairs]
    if not pairs:
        return Chart(title, "", None, "no lengths were foreseen before lines began")
    values = [{"expected": expected, "real": real, "run": name} for name, expected, real in pairs]
    top = max(max(pair) for _, *pair in pairs)
    scale = {"domain": [0, top], "nice": True}
    points = {
        "mark": {"type": "point", "filled": True, "opacity": 0.55, "size": 26},
        "data": {"values": values},
        "encoding": {
            "x": {"field": "expected", "type": "quantitative", "title": "tokens expected", "scale": scale},
            "y": {"field": "real", "type": "quantitative", "title": "tokens, real", "scale": scale},
            "color": _color(runs),
            "tooltip": [
                *([{"field": "run", "title": "run"}] if len(runs) > 1 else []),
                {"field": "expected", "title": "expected"},
                {"field": "real", "title": "real"},
            ],
        },
    }
    ends = [{"expected": 0, "real": 0}, {"expected": top, "real": top}]
    diagonal = {
        "mark": {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1.25, "color": {"expr": "quiet"}},
        "data": {"values": ends},
        "encoding": {
            "x": {"field": "expected", "type": "quantitative"},
            "y": {"field": "real", "type": "quantitative"},
        },
    }
    about = "A sample of lines: what was expected when each began. On the broken line, it came true."
    return Chart(title, about, sized({"layer": [diagonal, points]}))


def _whole_axis(highest: float, shown_as: str) -> Spec:
    """An axis of whole numbers from 0 to `highest`, with none of them twice."""
    axis: Spec = {"format": shown_as, "tickMinStep": 1}
    # Up to 2 Vega takes steps of one half in spite of `tickMinStep`.
    return axis if highest >= 3 else axis | {"values": [*range(max(1, int(highest)) + 1)]}


def _color(runs: Sequence[Run]) -> Spec:
    """The colour of a run, the same in each plot. What it is stands once on the page."""
    names = [run.name for run in runs]
    return {"field": "run", "type": "nominal", "scale": {"domain": names, "range": "category"}, "legend": None}


def _unit(seconds: float) -> tuple[str, float]:
    """The unit in which such a time is shown, and its seconds."""
    if seconds >= 3 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds >= 300 else ("seconds", 1.0)


def _short(value: float) -> float:
    return float(f"{value:.5g}")
