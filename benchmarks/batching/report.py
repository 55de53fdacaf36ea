"""The report: a Markdown document, readable on a terminal as it is, and all figures as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from benchmarks.batching.bars import REFERENCES, bars, deciles_bar, losses, p99_ratio, worse_deciles
from benchmarks.batching.findings import COSTS, LENGTHS, Cell, Estimate, Findings, Goodput, Load, estimate
from benchmarks.batching.peers import BY_REQUEST, GREEDY, OURS, SYSTEMS, UNLIMITED, title
from benchmarks.throughput.report import table

_ORDER = [*SYSTEMS, BY_REQUEST.name]

_INTRODUCTION = """\
Every system gets the same requests at the same times and stands before the same device, which sleeps as long as a \
real model would compute. Arrivals are open-loop: a request is sent at its time, however the system fares.

- **Device**: a batch takes alpha + beta · requests · longest request, one batch at a time, of at most 32 \
requests. {devices}
- **Capacity**: the rate that full batches of 32 requests, as they come, would keep up with. Loads are shares of it; a \
system that puts requests of like length together can go beyond it.
- **Limit** (SLO): so many times the latency of a batch of one of the request's own length (“mean”: of mean length), \
counted from the time at which the request was due to be sent.
- **In time**: the share of all requests *sent* that were answered right within their limit. Errors, refusals and \
answers that never came are misses. A request whose caller went away counts nowhere; a poisoned one must get the \
device's own error.
- **Lengths**: fixed, 64; log-normal, median 48, sigma 1, 1 to 512; Azure, prompts of the Azure LLM inference trace \
(conversations, 2023) over 8. Arrivals are Poisson; “bursts”: all in a quarter of the time, at four times the rate; \
“Azure times”: those of the trace.
- **As it comes**: the defaults, with the device's batch size given. batchwright is given each request's limit as its \
deadline and can refuse what it cannot answer in time; no call of another library here takes one. The row \
“{unlimited}” is the same without. “Sorted, as infinity” is greedy that sorts what waits, as infinity-emb's queue does.
- **Tuned**: the best of the published grid (below), found in each cell with a seed of its own.
- **±**: half of the 95% confidence interval (Student's t) of the mean of {seeds} seeds, {count:,} requests each. \
Systems meet the same seeds, so differences and ratios are taken in pairs.
- **Time is virtual**: the clock of the event loop jumps from timer to timer, so what a system computes costs no time, \
and nothing else on the machine disturbs: the figures can be repeated to the last digit. What is left out, the \
processor time of the systems themselves, is measured in section 6; section 7 repeats some runs in real time."""

_LOSSES = (
    "Where batchwright, as it comes, is not the best: in how many places, the worst first. Clear: the confidence"
    " interval of the difference does not reach zero (of overheads: the repeats do not overlap)."
)


def page(findings: Findings, plots: Mapping[str, str]) -> str:
    """The whole document. `plots`: file name by section, for those that are there."""
    host = findings.machine
    parts: list[str] = [
        "# Request-level batching in process",
        f"Printed by `benchmarks/request_batching.py` on {host['date']}. {host['processor']}, {host['cores']} cores,"
        f" Python {host['python']}. How to repeat it: [benchmarks/README.md](../README.md).",
    ]
    if not findings.complete:
        parts.append("**Interrupted: only a part was measured.**")
    parts += [f"- {note}" for note in findings.notes]
    parts += ["## In short", *_bullets(map(str, bars(findings)))]
    if found := losses(findings):
        parts += [_LOSSES, *_bullets(found)]
    if findings.systems:
        parts += ["## What is measured", _introduction(findings), *_bullets(_grids(findings))]
    sections = (
        ("1. Goodput", "goodput", goodput_section),
        ("2. Share in time at each load", "loads", lambda each: loads_section(each, "loads")),
        ("3. By length", "deciles", deciles_section),
        ("4. Faults", "faults", lambda each: loads_section(each, "faults")),
        ("5. Interactive among bulk", "urgent", urgent_section),
        ("6. Overhead", "overhead", overhead_section),
        ("7. Virtual time against real time", "real", real_section),
    )
    for heading, name, section in sections:
        if body := list(section(findings)):
            pictures = [f"![{heading}]({file})" for key, file in plots.items() if key.partition("-")[0] == name]
            parts += [f"## {heading}", body[0], *pictures, *body[1:]]
    for number, trial in enumerate(findings.trials, len(sections) + 1):
        parts += [f"## {number}. {trial.heading}", f"Virtual time. {trial.told}", table(trial.columns, trial.rows)]
    return "\n\n".join(parts) + "\n"


def _introduction(findings: Findings) -> str:
    devices = "; ".join(
        f"{name}: alpha = {1e3 * cost.alpha:g} ms, beta = {1e6 * cost.beta:g} µs" for name, cost in COSTS.items()
    )
    return _INTRODUCTION.format(
        devices=f"{devices}.", unlimited=title(UNLIMITED), seeds=len(findings.seeds), count=findings.count
    )


def _grids(findings: Findings) -> Iterator[str]:
    for name in _ORDER:
        if name in findings.systems:
            system = findings.systems[name]
            grid = " · ".join(_settings(options) for options in system.options)
            yield f"{title(name)}{f' ({system.version})' if system.version else ''}: {grid}"


def _settings(options: Mapping[str, object]) -> str:
    return "`" + (", ".join(f"{name}={value}" for name, value in options.items()) or "as it comes") + "`"


def goodput_section(findings: Findings) -> Iterator[str]:
    """The highest rates, as the systems come and tuned; nothing where there are none."""
    if not findings.goodput:
        return
    yield (
        "The highest offered rate, as a share of the capacity, at which at least 99% of all requests sent are answered"
        " right within their limit; rates 3% apart. The best of each line is bold. The last column is batchwright *as"
        " it comes* over the best of the others: of the two references (greedy, sorted) above, of all systems tuned"
        " below; the mean of the seeds' ratios (where one of those is"
        " 0, the ratio of the means). The settings that were chosen stand in the JSON file."
    )
    default = {cell: systems[OURS] for cell, systems in findings.by_cell(tuned=False) if OURS in systems}
    for tuned, heading in ((False, "As they come"), (True, "Tuned")):
        for device, cells in _by_device(list(findings.by_cell(tuned=tuned))):
            names = [name for name in _ORDER if any(name in systems for _, systems in cells)]
            rivals = [name for name in names if name != OURS] if tuned else list(REFERENCES)
            rows = [
                [cell.title, *_rates(systems, names), _ratio(default.get(cell), [systems.get(name) for name in rivals])]
                for cell, systems in cells
            ]
            against = "÷ best of the others" if tuned else "÷ best reference"
            yield f"### {heading}, {device}"
            yield table(["workload", *map(title, names), against], rows)


def _by_device(
    cells: Sequence[tuple[Cell, dict[str, Goodput]]],
) -> Iterator[tuple[str, list[tuple[Cell, dict[str, Goodput]]]]]:
    for device, group in groupby(cells, key=lambda pair: pair[0].device):
        yield device, list(group)


def _rates(systems: Mapping[str, Goodput], names: Sequence[str]) -> list[str]:
    best = max(each.mean for each in systems.values())
    return [
        "-" if name not in systems else _bold(_plain(estimate(systems[name].rates)), systems[name].mean == best)
        for name in names
    ]


def _ratio(ours: Goodput | None, others: Sequence[Goodput | None]) -> str:
    there = [each for each in others if each is not None]
    if ours is None or not there:
        return "-"
    best = max(there, key=lambda each: each.mean)
    if not best.mean:
        return "others 0" if ours.mean else "-"
    if not all(best.rates):
        return f"{ours.mean / best.mean:.2f}"
    return _plain(estimate([a / b for a, b in zip(ours.rates, best.rates, strict=True)]))


def loads_section(findings: Findings, section: str) -> Iterator[str]:
    """A table for each device and distribution of lengths; nothing where there are none."""
    chosen = findings.section(section)
    if not chosen:
        return
    faults = " 5% of the callers go away while they wait, 1% of the requests are poison." * (section == "faults")
    yield (
        f"Limit 5x, systems as they come.{faults} In each place: share in time; p99 of the latency of all requests"
        " sent (∞: more than 1% got no right answer); mean batch size."
    )
    for cell in dict.fromkeys(each.cell for each in chosen):
        yield f"### {LENGTHS[cell.workload.lengths]} lengths, {cell.device}".replace("### f", "### F").replace(
            "### l", "### L"
        )
        yield _load_table([each for each in chosen if each.cell == cell], _load_text, "system")


def _load_text(load: Load) -> str:
    share = estimate(load.in_time)
    size = statistics.fmean(result["mean_size"] for result in load.results)
    p99 = statistics.fmean(load.quantile("0.99"))
    return f"{100 * share.mean:.1f}% {_half(100 * share.half, 1)}; {_milliseconds(p99)}; {size:.1f}"


def _load_table(loads: Sequence[Load], text: Callable[[Load], str], corner: str) -> str:
    offered = sorted({each.load for each in loads})
    cells = {(each.system, each.load): text(each) for each in loads}
    names = [name for name in _ORDER if any((name, load) in cells for load in offered)]
    rows = [[title(name), *(cells.get((name, load), "-") for load in offered)] for name in names]
    return table([corner, *(f"{load:.0%}" for load in offered)], rows)


def deciles_section(findings: Findings) -> Iterator[str]:
    """Ours against greedy for each tenth of the requests by length; nothing where there are none."""
    places = [
        (cell, load, systems)
        for cell, load, systems in findings.by_load("loads")
        if cell.workload.lengths != "fixed" and {OURS, GREEDY} <= systems.keys()
    ]
    if not places:
        return
    yield (
        "The requests of section 2 in tenths by length, the shortest first: share in time of batchwright, as it comes,"
        " and of greedy. (!): worse than greedy, by more than the confidence interval of the difference. Of as many"
        " differences as these, some 2.5% would be marked if both served all lengths alike."
    )
    yield f"{deciles_bar(findings)}"
    for cell in dict.fromkeys(cell for cell, _, _ in places):
        columns = {load: _tenths(systems) for at, load, systems in places if at == cell}
        rows = [[str(tenth + 1), *(column[tenth] for column in columns.values())] for tenth in range(10)]
        yield f"### {cell}"
        yield table(["tenth", *(f"{load:.0%}" for load in columns)], rows)


def _tenths(systems: Mapping[str, Load]) -> list[str]:
    ours, greedy = (
        [statistics.fmean(each) for each in zip(*(r["deciles"] for r in systems[name].results), strict=True)]
        for name in (OURS, GREEDY)
    )
    worse = worse_deciles(systems[OURS], systems[GREEDY])
    return [f"{'(!) ' * w}{a:.1%} / {b:.1%}" for a, b, w in zip(ours, greedy, worse, strict=True)]


def urgent_section(findings: Findings) -> Iterator[str]:
    """Latencies of interactive and of bulk requests; nothing where there are none."""
    chosen = findings.section("urgent")
    if not chosen:
        return
    yield (
        "One request in five is interactive, the rest is bulk: steady, or in dumps of 200 at once. There are no limits"
        " and nobody is given any; batchwright is informed which requests are urgent (`priority`); no call of another"
        " library here takes that. In each place: median and p99 in ms of interactive requests, in brackets"
        " the p99 over greedy's; median and p99 of bulk."
    )
    greedy = {(each.cell, each.load): each for each in chosen if each.system == GREEDY}
    for cell in dict.fromkeys(each.cell for each in chosen):
        yield f"### {cell}"
        yield _load_table([each for each in chosen if each.cell == cell], lambda each: _urgent_text(each, greedy), "")


def _urgent_text(load: Load, greedy: Mapping[tuple[Cell, float], Load]) -> str:
    def pair(of: str) -> str:
        return " / ".join(_number(1e3 * statistics.fmean(load.quantile(share, of))) for share in ("0.5", "0.99"))

    reference = greedy.get((load.cell, load.load))
    ratio = f" ({p99_ratio(load, reference):.2f})" if reference is not None else ""
    return f"{pair('urgent')}{ratio}; {pair('bulk')}"


def overhead_section(findings: Findings) -> Iterator[str]:
    """Processor time a request; nothing where there is none."""
    if not findings.overhead:
        return
    callers = statistics.median(value for each in findings.overhead for value in each.callers)
    yield (
        "Real time. 32 callers, each with one request at a time, before a device that answers at once after one turn of"
        " the event loop: microseconds of processor time of the whole process for each request, median of"
        f" {len(findings.overhead[0].micros)} repeats of which all systems had each in turn, least and greatest in"
        f" brackets. {callers:.1f} µs of it are the callers themselves. “batchwright” is `Batcher.compute`, an item in"
        " and an output out, as for the others; `add_request` makes a request and a full response of each. No request"
        " has a limit."
    )
    found = {each.system: each for each in findings.overhead}
    rows = [
        [
            title(name),
            f"{found[name].median:.1f} ({min(found[name].micros):.1f}..{max(found[name].micros):.1f})",
            f"{found[name].mean_size:.1f}",
        ]
        for name in sorted(found, key=lambda name: found[name].median)
    ]
    yield table(["system", "µs a request", "mean batch size"], rows)


def real_section(findings: Findings) -> Iterator[str]:
    """The same runs in virtual and in real time; nothing where there are none."""
    if not findings.real:
        return
    yield (
        "Runs of section 2 with fewer requests, once in virtual and once in real time, where timers are late, the"
        " systems' own computing takes its time, and other processes disturb: share in time, mean of the"
        " first two seeds."
    )
    rows = [
        [
            f"{each.cell}, {each.load:.0%}",
            title(each.system),
            f"{statistics.fmean(each.virtual):.1%}",
            f"{statistics.fmean(each.real):.1%}",
        ]
        for each in findings.real
    ]
    yield table(["workload", "system", "virtual", "real"], rows)


def figures(findings: Findings) -> bytes:
    """Every figure as JSON, to five digits, a line for each record; `read_figures` reads it."""
    content: dict[str, Any] = _rounded(msgspec.to_builtins(findings))
    lines = [
        f"{_dumps(name)}:" + ("[\n" + ",\n".join(map(_dumps, value)) + "\n]" if _is_records(value) else _dumps(value))
        for name, value in content.items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def read_figures(content: bytes) -> Findings:
    """What `figures` wrote. Raises `msgspec.ValidationError` or `msgspec.DecodeError`."""
    return msgspec.json.decode(content, type=Findings)


def _is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


def _bullets(lines: Iterator[str] | Sequence[str]) -> list[str]:
    text = "\n".join(f"- {line}" for line in lines)
    return [text] if text else []


def _plain(value: Estimate) -> str:
    return f"{value.mean:.2f} {_half(value.half, 2)}"


def _half(half: float, digits: int) -> str:
    return "±?" if math.isinf(half) else f"±{half:.{digits}f}"


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _milliseconds(seconds: float) -> str:
    return "∞" if math.isinf(seconds) else f"{_number(1e3 * seconds)} ms"


def _number(value: float) -> str:
    """To three digits, without an exponent."""
    if math.isinf(value):
        return "∞"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
