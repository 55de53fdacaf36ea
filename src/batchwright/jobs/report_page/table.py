"""The key figures of runs, as texts in rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchwright.jobs.report_page.charts import Run, is_long, words_of
from batchwright.jobs.report_page.reading import Latencies, Report
from batchwright.planning.bound import LEAST_SHARE_SHOWN
from batchwright.pricing.rates import money

_NOT_KNOWN = "-"


def rows_of(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the name of each figure that any run has, and its text for each run."""
    rows = []
    for name, text in _FIGURES:
        texts = [text(run.report) for run in runs]
        if any(texts):
            rows.append((name, [each or _NOT_KNOWN for each in texts]))
    return rows


def state_of(report: Report) -> tuple[str, str]:
    """Return how a run ended, in words, and its tone."""
    left = report.total - report.done
    if report.interrupted:
        return f"interrupted, {_number(left)} of {_lines(report.total)} left", "bad"
    if left > 0:
        return f"ended early, {_number(left)} of {_lines(report.total)} left", "bad"
    if report.failed:
        return f"complete, {_lines(report.failed)} failed", "warn"
    return "complete", "good"


def duration(seconds: float) -> str:
    """Return a time as a person says it: `0.84 s`, `75.3 s`, `12 min 5 s`, `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {second} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _lines(number: int) -> str:
    return f"{number:,} line" if number == 1 else f"{number:,} lines"


def _counted(value: int | None) -> str:
    return _number(value) if value else ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _time(value: float | None) -> str:
    return duration(value) if value else ""


def _rate(report: Report) -> str:
    rate = report.generated_tokens_per_second
    return f"{rate:,.0f} tokens/s" if rate else ""


def _lines_row(report: Report) -> str:
    more = f", {report.resumed:,} of them by earlier runs" if report.resumed else ""
    return f"{report.done:,} of {report.total:,}{more}"


def _occupancy(report: Report) -> str:
    if not report.has_engine or report.occupancy_mean is None:
        return ""
    return (
        f"{report.occupancy_mean:,.1f} in a step, peak {report.occupancy_peak or 0:,} of {report.max_num_seqs or 0:,}"
    )


def _kv(report: Report) -> str:
    if not report.kv_blocks or report.kv_blocks_peak is None or not report.has_engine:
        return ""
    share = report.kv_blocks_peak / report.kv_blocks
    return f"peak {report.kv_blocks_peak:,} of {report.kv_blocks:,} blocks ({share:.0%})"


def _latencies(of: Callable[[Report], Latencies]) -> Callable[[Report], str]:
    def text(report: Report) -> str:
        found = of(report)
        if found.p50 is None or found.p99 is None:
            return ""
        return f"p50 {found.p50:,.0f} ms, p99 {found.p99:,.0f} ms"

    return text


def _cost(report: Report) -> str:
    spending = report.spending
    if spending is None or spending.cost is None:
        return ""
    text = money(spending.cost)
    if spending.cost_of_all_runs is not None and spending.cost_of_all_runs != spending.cost:
        text += f", {money(spending.cost_of_all_runs)} in all runs"
    return text + (f", of a budget of {money(spending.budget)}" if spending.budget is not None else "")


def _saved(report: Report) -> str:
    spending = report.spending
    amount = 0.0 if spending is None else (spending.saved_by_caching or 0.0) + (spending.saved_by_batching or 0.0)
    return money(amount) if amount > 0 else ""


def _requests(report: Report) -> str:
    sent = sum(each.sent for each in report.pacing.values())
    refused = sum(each.refused for each in report.pacing.values())
    return f"{sent:,} sent, {refused:,} refused" if sent else ""


def _memory(report: Report) -> str:
    size = report.peak_memory_bytes or 0
    return "" if not size else f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _padding(report: Report) -> str:
    return _share(report.padding_efficiency) if report.has_engine else ""


def _bound(report: Report) -> str:
    if report.share_of_bound is None:
        return ""
    seconds = "" if report.bound_seconds is None else f" of {duration(report.bound_seconds)}"
    return f"{report.share_of_bound:.0%} of the bound{seconds}"


def _lost(report: Report) -> str:
    lost = sorted(({} if report.bound is None else report.bound.lost).items(), key=lambda each: -each[1])
    return ", ".join(f"{share:.0%} {words_of(name)}" for name, share in lost if share >= LEAST_SHARE_SHOWN)


_FIGURES: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("State", lambda report: state_of(report)[0]),
    ("Lines", _lines_row),
    ("Failed", lambda report: _number(report.failed)),
    ("Identical to others", lambda report: _counted(report.deduplicated)),
    ("Time", lambda report: _time(report.wall_seconds)),
    ("of which loading", lambda report: _time(report.load_seconds)),
    ("of which measuring the machine", lambda report: _time(report.rates_seconds if is_long(report) else None)),
    ("of which computing", lambda report: _time(report.loop_seconds)),
    ("Speed", _bound),
    ("Beyond the bound", _lost),
    ("Prompt tokens", lambda report: _counted(report.prompt_tokens)),
    ("Answer tokens", lambda report: _counted(report.generated_tokens)),
    ("Answers", _rate),
    ("Reuse of prompts", lambda report: _share(report.cached_share) if report.prompt_tokens else ""),
    ("Cost", _cost),
    ("Saved", _saved),
    ("Requests", _requests),
    ("Time to first token", _latencies(lambda report: report.ttft_ms)),
    ("Time per token", _latencies(lambda report: report.tpot_ms)),
    ("Occupancy", _occupancy),
    ("KV cache", _kv),
    ("Preemptions", lambda report: _counted(report.preemptions)),
    ("Useful rows", _padding),
    ("Ended at max_tokens", lambda report: _counted(report.cut_answers)),
    ("Without valid JSON", lambda report: _counted(report.invalid_answers)),
    ("Peak memory", _memory),
    ("Model", lambda report: report.model),
    ("Engine", lambda report: report.implementation),
    ("Input", lambda report: ", ".join(report.inputs)),
    ("Output", lambda report: report.output),
    ("Version", lambda report: report.version or ""),
)
