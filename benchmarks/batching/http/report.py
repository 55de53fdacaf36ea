"""The tables, in Markdown, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from benchmarks.batching.http.load import PATIENCE
from benchmarks.batching.http.run import COST, Measured, Scenario
from benchmarks.throughput.report import machine, table

_T = TypeVar("_T")
_LENGTHS = {"fixed": "Fixed lengths (64)", "lognormal": "Log-normal lengths (median 48, sigma 1, 1 to 512)"}


def shares_table(results: Sequence[Measured]) -> str:
    """A row for each system and setting, a column for each scenario: the share in time, its range over the seeds."""
    scenarios = _unique([result.scenario for result in results])
    cells = {(_label(result), result.scenario): _share(result) for result in results}
    labels = _unique([_label(result) for result in results])
    rows = [[label, *(cells.get((label, scenario), "-") for scenario in scenarios)] for label in labels]
    return table(["server", *(_title(scenario) for scenario in scenarios)], rows)


def latency_table(results: Sequence[Measured]) -> str:
    """A row for each run: latencies, errors, and how well the generator kept up."""
    head = ["server", "load", "requests", "p50 ms", "p99 ms", "errors", "sent late by at most, ms"]
    rows = [
        [
            _label(result),
            _title(result.scenario),
            str(result.requests),
            _milliseconds(result.p50),
            _milliseconds(result.p99),
            ", ".join(f"{count} {kind}" for kind, count in sorted(result.errors.items())) or "-",
            _milliseconds(result.lag),
        ]
        for result in results
    ]
    return table(head, rows)


def tables(results: Sequence[Measured]) -> str:
    """All figures, by distribution of lengths."""
    parts = []
    for lengths in _unique([result.scenario.lengths for result in results]):
        chosen = [result for result in results if result.scenario.lengths == lengths]
        parts += [f"## {_LENGTHS[lengths]}", shares_table(chosen), latency_table(chosen)]
    return "\n\n".join(parts)


def page(results: Sequence[Measured], seeds: int, seconds: float) -> str:
    """The whole report as a Markdown document."""
    host = machine()
    parts = [
        "# Request-level batching over HTTP",
        f"Printed by `benchmarks/request_batching.py --http` on {host['date']}. {host['processor']}, {host['cores']}"
        f" cores, the load generator on one of them and the server on the rest; Python {host['python']}. The model of"
        f" every server sleeps {1e3 * COST.alpha:g} ms + {1e6 * COST.beta:g} µs for each cell of the padded batch, one"
        f" batch of at most {COST.max_batch_size} at a time. Loads are shares of the rate that full batches of requests"
        " as they come would keep up with. Arrivals are Poisson and open-loop.",
        f"Share of requests answered right within 5 times the latency of a batch of one of their length, counted from"
        f" the time they were due: mean of {seeds} seeds of {seconds:g} s each, lowest and highest in brackets. Errors"
        f" count as misses; requests were waited for up to {PATIENCE} times their SLO. “Faults”: 1% of the requests"
        " make their batch raise, 5% of the callers hang up. In brackets the settings, by the library's own names; none"
        " is the library as it comes, with the batch size given.",
        f"The generator sent no request later than {_milliseconds(max(result.lag for result in results))} ms after its"
        f" time, and used at most {max(result.generator for result in results):.0%} of its core.",
        tables(results),
    ]
    return "\n\n".join(parts) + "\n"


def figures(results: Sequence[Measured], seeds: int, seconds: float) -> str:
    """Every figure, as JSON."""
    content: dict[str, Any] = {
        "machine": machine(),
        "cost": asdict(COST),
        "seeds": seeds,
        "seconds": seconds,
        "results": [asdict(result) | {"rate": result.scenario.rate} for result in results],
    }
    return json.dumps(content, indent=1) + "\n"


def _label(result: Measured) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in result.settings.items())
    return f"{result.system} ({settings})" if settings else result.system


def _title(scenario: Scenario) -> str:
    return f"{scenario.load:.0%}{', faults' if scenario.faults else ''}"


def _share(result: Measured) -> str:
    return f"{result.mean:.3f} ({min(result.in_time):.3f}..{max(result.in_time):.3f})"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _unique(items: Sequence[_T]) -> list[_T]:
    return list(dict.fromkeys(items))
