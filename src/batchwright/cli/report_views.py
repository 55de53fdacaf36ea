"""What the report of a run shows in the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from batchwright.cli.pacing_views import pacing_rows
from batchwright.cli.quantities import counted, duration
from batchwright.cli.visible_text import visible
from batchwright.planning.bound import LEAST_SHARE_SHOWN, PART_NAMES
from batchwright.pricing.rates import money

if TYPE_CHECKING:
    from batchwright.jobs.failures import Failure
    from batchwright.jobs.report import Percentiles, RunReport
    from batchwright.jobs.spending import Spending
    from batchwright.planning.field_order import FieldReuse

MESSAGE_SHOWN = 200
"""Characters of an error's message that are shown."""
_NUMBERS_SHOWN = 10
"""Most line numbers shown for one error code."""
_LEAST_LATE = 1.0
"""Least seconds after the deadline that are shown."""
_LEAST_MEASURING = 0.1
"""Least seconds of measuring the rates of the machine that are shown."""


def report_table(report: RunReport) -> Table:
    """Return what a run did, one figure per line; figures of the engine only if it computed something."""
    end = "Interrupted" if report.interrupted else "Done" if report.done == report.total else "Stopped"
    lines = f"{report.done:,} of {counted(report.total, 'line')}"
    title = f"{end}: {lines}, {report.failed:,} failed, {report.resumed:,} by earlier runs"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.min_width = len(title)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    loading = f", of which loading the model {report.load_seconds:.1f} s" if report.steps else ""
    if report.rates_seconds >= _LEAST_MEASURING:
        loading += f", measuring the rates of this machine {report.rates_seconds:.1f} s"
    table.add_row("wall time", f"{report.wall_seconds:.1f} s{loading}")
    for name, value in [
        *_token_rows(report),
        *_saving_rows(report),
        *_money_rows(report),
        *pacing_rows(report.pacing),
        *(_engine_rows(report) if report.steps else []),
    ]:
        table.add_row(Text(name), Text(visible(value)))
    if report.batches is not None:
        table.add_row("batches", Text(_batches_row(report.batches)))
    memory = _size(report.peak_memory_bytes)
    if report.peak_gpu_bytes is not None:
        memory += f", {_size(report.peak_gpu_bytes)} on the GPU"
    table.add_row("peak memory", memory)
    return table


_SHOWN_BATCHES = 10


def _batches_row(batches: dict[str, Any]) -> str:
    """Return what became of a provider's batches and their lines."""
    parts = [f"{batches['submitted']:,} submitted"]
    parts += [f"{batches['resumed']:,} of earlier runs"] if batches["resumed"] else []
    parts += [f"{number:,} {ending}" for ending, number in batches["endings"].items()]
    words = {"answered": "answered", "failed": "failed", "again": "submitted again", "moved": "moved to live requests"}
    lines = [f"{counted(batches[name], 'line')} {word}" for name, word in words.items() if batches[name]]
    late = batches.get("late_seconds", 0.0)
    missed = f"; ended {duration(late)} after the deadline" if late >= _LEAST_LATE else ""
    return f"{', '.join(parts)}; {', '.join(lines) or 'no line ended'}{missed}"


def batches_left(report: RunReport, options: Sequence[str]) -> str:
    """Return which batches an interrupted run leaves at the provider, and how they are cancelled.

    `options` of the command name the provider and its key.
    """
    left = (report.batches or {}).get("at_provider") or []
    unclear = (report.batches or {}).get("unclear") or 0
    message = ""
    if left:
        command = shlex.join(["batchwright", "batches", "cancel", *options, *left[:_SHOWN_BATCHES]])
        more = (
            ""
            if len(left) <= _SHOWN_BATCHES
            else f" … and {len(left) - _SHOWN_BATCHES} more (batchwright batches list)"
        )
        kept = "" if "://" in report.output else f"; until then their lines are kept in {report.output}.batches"
        few = "1 batch goes" if len(left) == 1 else f"{len(left):,} batches go"
        message += f"\n{few} on at the provider, and the same command takes the results{kept}."
        message += f" To cancel: {command}{more}"
    if unclear:
        message += (
            f"\n{'1 batch was' if unclear == 1 else f'{unclear:,} batches were'} just being created: the same command "
            "finds out whether it exists before it creates anything."
        )
    return message


def failures_table(report: RunReport) -> Table:
    """Return the failed lines by code and field, with an example of each."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), title="Failed lines, with an example of each kind", title_justify="left"
    )
    table.add_column("lines", justify="right")
    table.add_column("code", no_wrap=True)
    table.add_column("example", justify="right", no_wrap=True)
    table.add_column()
    for failure in report.failures:
        message = " ".join(failure.message.split())
        shown = message if len(message) <= MESSAGE_SHOWN else message[:MESSAGE_SHOWN] + "…"
        table.add_row(f"{failure.count:,}", Text(visible(failure.code)), f"line {failure.line:,}", Text(visible(shown)))
        if len(failure.lines) > 1:
            table.add_row("", "", "", Text(_lines_of(failure), style="dim"))
    return table


def _lines_of(failure: Failure) -> str:
    """The numbers of the first lines that failed like this."""
    numbers = failure.lines[:_NUMBERS_SHOWN]
    more = failure.count - len(numbers)
    return f"lines {', '.join(map(str, numbers))}" + (f", and {more:,} more" if more else "")


def fields_in_common(reuse: FieldReuse) -> str:
    """Return what reordering the fields of a template gained."""
    return (
        f"{reuse.after:.0%} of the fields' text begins as in an earlier row, of {reuse.rows:,} compared; in the order"
        f" of the template it would be {reuse.before:.0%}"
    )


def _token_rows(report: RunReport) -> list[tuple[str, str]]:
    if not report.prompt_tokens + report.generated_tokens:
        return []
    rows = [
        ("tokens", f"{report.prompt_tokens:,} prompt, {report.generated_tokens:,} generated"),
        ("generated", f"{report.generated_tokens_per_second:,.0f} tokens/s over {report.loop_seconds:.1f} s"),
    ]
    if report.cut_answers:
        rows.append(("cut", f"{counted(report.cut_answers, 'answer')} ended at max_tokens"))
    if report.invalid_answers:
        rows.append(("invalid", f"{counted(report.invalid_answers, 'answer')} without valid JSON: see finish_reason"))
    return rows


def _saving_rows(report: RunReport) -> list[tuple[str, str]]:
    """What an endpoint's prompt cache and identical lines saved."""
    rows = []
    if report.reordered_fields is not None:
        rows.append(("fields", fields_in_common(report.reordered_fields)))
    is_priced = report.spending is not None and report.spending.cached_tokens > 0
    if report.cached_tokens and not report.steps and not is_priced:
        rows.append(("prompt cache", f"{report.cached_share:.1%} of the prompt tokens found in it"))
    if report.deduplicated:
        saved = f"{report.saved_prompt_tokens:,} prompt and {report.saved_generated_tokens:,} generated tokens saved"
        rows.append(("identical", f"{counted(report.deduplicated, 'line')} computed once with others, {saved}"))
    if report.asked_again:
        rows.append(("sent again", f"{counted(report.asked_again, 'time')}, as answers were no JSON"))
    return rows


def _not_known(spending: Spending) -> str:
    """What may have to be paid in addition to the cost of answers."""
    text = ""
    for number, noun, where, most in (
        (spending.unknown_requests, "request", "whose cost is not known", spending.unknown_at_most),
        (spending.in_batches, "line", "in batches at the provider", spending.in_batches_at_most),
    ):
        if number:
            amount = "an unknown amount" if most is None else f"at most {money(most)}"
            text += f"; {amount} more for {counted(number, noun)} {where}"
    return text


def paid_so_far(report: RunReport) -> str:
    """Return what an interrupted run left under way at an endpoint, and what the job has cost, each in a line."""
    text = ""
    if report.cut_off:
        were = "was" if report.cut_off == 1 else "were"
        text += f"\n{counted(report.cut_off, 'request')} {were} under way: what they answer is lost, and may be paid."
    if report.spending is not None:
        text += f"\nPaid so far: {money(report.spending.cost_of_all_runs)}{_not_known(report.spending)}."
    return text


def _money_rows(report: RunReport) -> list[tuple[str, str]]:
    rows = []
    spending = report.spending
    if spending is not None:
        cost = f"{money(spending.cost)} in this run, {money(spending.cost_of_all_runs)} in all runs"
        if spending.budget is not None:
            cost += f", of {money(spending.budget)}"
        cost += _not_known(spending)
        if spending.unpriced_requests:
            cost += f"; without {counted(spending.unpriced_requests, 'request')} whose price is not known"
        rows.append(("cost", cost))
        if spending.cached_tokens:
            found = f"{spending.cached_share:.1%} of the prompt tokens found in it"
            rows.append(("prompt cache", f"{found}, {money(spending.saved_by_caching)} saved"))
        if spending.saved_by_batching:
            rows.append(("provider's batches", f"{money(spending.saved_by_batching)} saved"))
    limit = report.unreached_limit
    if limit is not None and report.longest_answer * 2 <= limit:
        rows.append(
            (
                "max_tokens",
                f"no answer needed more than {report.longest_answer:,} of its {limit:,} tokens: a lower limit reserves "
                "less of rate limits and budget",
            )
        )
    return rows


def _engine_rows(report: RunReport) -> list[tuple[str, str]]:
    kv_share = report.kv_blocks_peak / report.kv_blocks if report.kv_blocks else 0.0
    outside = report.outside_model_seconds / report.loop_seconds if report.loop_seconds else 0.0
    guessed = f"{report.accepted_tokens:,} of {report.drafted_tokens:,} guessed tokens were right"
    drafting = [("drafting", guessed)] if report.drafted_tokens else []
    if report.forced_tokens:
        drafting.append(("forced", f"{counted(report.forced_tokens, 'token')} followed from the form of the answer"))
    occupancy = f"{report.occupancy_mean:.1f} sequences in a step, peak {report.occupancy_peak} of"
    return [
        ("engine", report.implementation),
        ("prefill", f"{report.prefill_tokens_per_second:,.0f} tokens/s of model time"),
        ("decode", f"{report.decode_tokens_per_second:,.0f} tokens/s of model time"),
        ("TTFT", _percentiles(report.ttft_ms)),
        ("TPOT", _percentiles(report.tpot_ms)),
        ("occupancy", f"{occupancy} {report.max_num_seqs}, {report.steps:,} steps"),
        ("padding", f"{report.padding_efficiency:.1%} of the computed rows were useful"),
        *drafting,
        ("KV cache", f"peak {report.kv_blocks_peak:,} of {report.kv_blocks:,} blocks ({kv_share:.0%})"),
        ("prefix cache", f"{report.prefix_hit_rate:.1%} of the prompt tokens found in it"),
        ("preemptions", f"{report.preemptions:,}"),
        *_bound_rows(report),
        ("outside model", f"{report.outside_model_seconds:.2f} s ({outside:.0%} of the loop)"),
    ]


def _bound_rows(report: RunReport) -> list[tuple[str, str]]:
    """How close the run came to what this machine can do, and what the rest of its time went into."""
    if report.share_of_bound is None or report.bound is None:
        reason = report.no_bound
        return [("speed", f"its share of the bound is not known: {reason}")] if reason else []
    lost = sorted(report.bound["lost"].items(), key=lambda each: -each[1])
    parts = [f"{share:.0%} {PART_NAMES[name]}" for name, share in lost if share >= LEAST_SHARE_SHOWN]
    text = f"{report.share_of_bound:.0%} of the bound of {report.bound_seconds:,.1f} s"
    return [("speed", "; ".join([text, *([", ".join(parts)] if parts else [])]))]


def _percentiles(values: Percentiles) -> str:
    p50, p90, p99 = values["p50"], values["p90"], values["p99"]
    if p50 is None or p90 is None or p99 is None:
        return "none"
    return f"p50 {p50:,.0f} ms, p90 {p90:,.0f} ms, p99 {p99:,.0f} ms"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
