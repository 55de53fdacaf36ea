"""Tables in Markdown, readable on a terminal as they are."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchwright.planning.bound import PART_NAMES, PARTS
from benchmarks.throughput.measure import Ratio, Result
from benchmarks.throughput.systems import LLAMA_CPP, OPENVINO, OURS, PEERS, PRODUCTS, TRANSFORMERS, VLLM
from benchmarks.throughput.workers.protocol import Ready

_TITLES = {
    OURS: "batchwright",
    VLLM: "vLLM",
    OPENVINO: "OpenVINO",
    LLAMA_CPP: "llama.cpp",
    TRANSFORMERS: "transformers",
    PRODUCTS: "products",
}
_GOAL = 0.85
"""Share of the bound that every workload should reach."""
_CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def throughput_table(results: Sequence[Result], precisions: Mapping[str, str]) -> str:
    """Tokens/s of every system and the ratios of ours to theirs: of the medians, and the range over the rounds.

    `precisions` are those of the weights, by system.
    """
    others = [system for system in (*PEERS, PRODUCTS) if any(system in result.rates for result in results)]
    rated = [f"{_TITLES[system]} {precisions[system]}" for system in (OURS, *others)]
    head = ["workload", *rated, *(f"vs {_TITLES[system]}" for system in others)]
    rows = [
        [
            result.workload.name,
            *(_rate(result.median(system)) for system in (OURS, *others)),
            *(_ratio(result.ratio(system)) for system in others),
        ]
        for result in results
    ]
    return table(head, rows)


def profile_table(profiles: Mapping[str, Mapping[str, float]]) -> str:
    """Milliseconds per step in each part, and their share of the step, by workload."""
    pieces = [piece for piece in next(iter(profiles.values())) if piece != "steps"]
    rows = []
    for name, seconds in profiles.items():
        steps, total = seconds["steps"], sum(seconds[piece] for piece in pieces)
        cells = [f"{1e3 * seconds[piece] / steps:.2f} ({seconds[piece] / total:.0%})" for piece in pieces]
        rows.append([name, *cells, f"{1e3 * total / steps:.2f}", f"{steps:.0f}"])
    return table(["workload", *pieces, "ms a step", "steps"], rows)


def bound_paragraph(bounds: Mapping[str, Mapping[str, float]]) -> str:
    """What the figures of `bound_table` are, and by which rates."""
    operations = max(each["operations/s"] for each in bounds.values())
    bandwidth = max(each["bytes/s"] for each in bounds.values())
    return (
        "How close our jobs came to their bounds: the least time in which this machine could compute them, all rows"
        f" once, at {operations / 1e9:,.0f} Gop/s of matrix products and {bandwidth / 1e9:,.0f} GB/s of memory, the"
        f" best that were measured right before and in these jobs, timed apart from the table above (goal {_GOAL:.0%}):"
    )


def bound_table(bounds: Mapping[str, Mapping[str, float]]) -> str:
    """The bound of each job, its time, and what the rest of that was lost to."""
    rows = []
    for name, figures in bounds.items():
        lost = sorted(((figures[part], part) for part in PARTS), reverse=True)
        what = ", ".join(f"{share:.0%} {PART_NAMES[part]}" for share, part in lost if round(100 * share))
        rows.append([name, f"{figures['bound']:.2f} s", f"{figures['seconds']:.2f} s", _share(figures), what])
    return table(["workload", "bound", "time", "share", "lost"], rows)


def _share(figures: Mapping[str, float]) -> str:
    return f"{figures['bound'] / figures['seconds']:.0%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(head), line(rule), *(line(row) for row in rows)])


def settings_list(ready: Mapping[str, Ready]) -> str:
    return "\n".join(f"- {_TITLES[name]} {about['version']}: {about['settings']}" for name, about in ready.items())


def trial_list(name: str, rates: Mapping[str, float]) -> str:
    """Tokens/s of the ways in which the system `name` was tried, by their settings, the fastest first."""
    fastest_first = sorted(rates.items(), key=lambda item: -item[1])
    ways = "; ".join(f"{settings}: {rate:,.0f}" for settings, rate in fastest_first)
    return f"{_TITLES[name]} was tried in these ways first (tokens/s with 64 short sequences): {ways}."


def workload_list(results: Sequence[Result]) -> str:
    return "\n".join(f"- {result.workload.name}: {result.workload.description}" for result in results)


def machine() -> dict[str, Any]:
    """The processor, as far as the system states it, and the date."""
    info = _cpu_info()
    features = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "processor": info.get("model name") or platform.processor() or platform.machine(),
        "features": [feature for feature in _CPU_FEATURES if feature in features],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def page(
    results: Sequence[Result],
    precisions: Mapping[str, str],
    ready: Mapping[str, Ready],
    model: str,
    rounds: int,
    rest: Sequence[str],
) -> str:
    """The whole report as a Markdown document."""
    host = machine()
    how_often = "one round" if rounds == 1 else f"median of {rounds} rounds"
    return (
        "\n\n".join(
            [
                f"# Engine throughput on the CPU, {precisions[OURS]}",
                f"Generated tokens per second, {how_often}; printed by `benchmarks/engine.py` on"
                f" {host['date']}. {model}, greedy, end of text ignored. {host['processor']},"
                f" {host['cores']} cores ({', '.join(host['features'])}), Python {host['python']}. What the columns"
                " mean and how to repeat it: [benchmarks/README.md](../README.md).",
                throughput_table(results, precisions),
                workload_list(results),
                settings_list(ready),
                *rest,
            ]
        )
        + "\n"
    )


def _cpu_info() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f}" + (f" ({ratio.low:.2f}..{ratio.high:.2f})" if ratio.low < ratio.high else "")
