"""What a run shows: its progress, as a live line on a terminal and plain log lines elsewhere, and its report."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from batchwright.cli.pacing_views import pacing_line, pacing_rows
from batchwright.clock import Clock, MonotonicClock
from batchwright.inference.replicas.ray_opening import JOINED
from batchwright.lines.line_executor import LATEST
from batchwright.pricing.rates import DOLLAR, shown_dollars

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.dry_run import AnswersPlanned
    from batchwright.jobs.failures import Failure
    from batchwright.jobs.job_run import RunProgress
    from batchwright.jobs.planned_time import PlannedTime
    from batchwright.jobs.prompt_survey import SharedBeginning, SharedPrompts
    from batchwright.jobs.report import Percentiles, RunReport
    from batchwright.jobs.spending import PlannedCost, Spending
    from batchwright.planning.field_order import FieldReuse

_PHASES = {
    "reading": "reading the input",
    "loading": "loading the model",
    "connecting": "connecting to the endpoint",
    "running": "running",
    "stopping": "finishing the lines under way; Ctrl-C ends at once",
    "finishing": "finishing",
}
_SECONDS_BETWEEN_LOG_LINES = 10.0
_SECONDS_BETWEEN_DRAWINGS = 0.2
_NUMBERS = re.compile(r"[\d,.]+")
_SHOWN_OF_BEGINNING = 60
"""Characters of what prompts share that are shown."""
_SHOWN_OF_TEXT = 400
"""Characters of each end of a long prompt that are shown."""
_MESSAGE_SHOWN = 200
"""Characters of an error's message that are shown."""
_NUMBERS_SHOWN = 10
"""Numbers of lines that failed with one code that are shown."""
_LEAST_LATE = 1.0
"""Seconds after the deadline that are shown."""
_LEAST_LEFT = 0.5
"""Seconds left that are shown: a forecast of fewer that lasts is one of the last lines, which wait for something."""
_SHORTEST_RATE = 1.0
"""Seconds of running after which a rate means something."""


@contextmanager
def progress_view(console: Console, *, quiet: bool) -> Iterator[Callable[[RunProgress], None]]:
    """Show the progress that the yielded function is called with, in a way that fits what `console` writes to."""
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        view = TerminalProgress(console)
        with view.bar:
            yield view
    else:
        yield LogProgress(sys.stderr)


class ThroughputMeter:
    """Speed of a run, without the lines that earlier runs answered."""

    def __init__(self) -> None:
        self._started: float | None = None

    def of(self, progress: RunProgress, now: float) -> float:
        """Return generated tokens per second; 0 while they cannot be told."""
        if progress.phase != "running":
            return 0.0
        if self._started is None:
            self._started = now
        elapsed = now - self._started
        return progress.generated_tokens / elapsed if elapsed >= _SHORTEST_RATE else 0.0


class FirstFailure:
    """The first failure of a run, to be told once, when it happens: it may well be that of all lines."""

    def __init__(self) -> None:
        self._told = False

    def of(self, progress: RunProgress) -> str | None:
        """Return the text about it, the first time that there is one."""
        failure = progress.first_failure
        if self._told or failure is None:
            return None
        self._told = True
        message = " ".join(failure.message.split())[:_MESSAGE_SHOWN]
        return f"line {failure.line:,} ({failure.custom_id}) failed: {failure.code}: {message}"


class LogProgress:
    """Progress as log lines: one at each phase and for each new kind of waiting, and one every ten seconds."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream = stream
        self._clock = clock or MonotonicClock()
        self._rates = ThroughputMeter()
        self._first_failure = FirstFailure()
        self._shown: tuple[str, str | None] = ("", None)
        self._told: set[str] = set()
        """What lines were said to wait for."""
        self._last = 0.0

    def __call__(self, progress: RunProgress) -> None:
        now = self._clock.now()
        rate = self._rates.of(progress, now)
        if (failure := self._first_failure.of(progress)) is not None:
            print(f"batchwright: {failure}", file=self._stream, flush=True)
        # Numbers and single errors change all the time, such as the seconds until a provider is asked again.
        waiting = _NUMBERS.sub("", (progress.waiting or "").partition(LATEST)[0])
        shown = progress.phase, progress.detail
        is_news = bool(waiting) and waiting not in self._told
        if shown == self._shown and not is_news and now - self._last < _SECONDS_BETWEEN_LOG_LINES:
            return
        self._shown, self._last = shown, now
        self._told.add(waiting)
        print(f"batchwright: {_PHASES[progress.phase]}{_standing(progress, rate)}", file=self._stream, flush=True)


def _standing(progress: RunProgress, rate: float) -> str:
    if not progress.total:
        return ""
    if progress.detail is not None:
        return f": {progress.detail}"
    parts = [f"{progress.done:,} of {counted(progress.total, 'line')} done"]
    if progress.failed:
        parts.append(f"{progress.failed:,} failed")
    if progress.resumed:
        parts.append(f"{progress.resumed:,} by earlier runs")
    if rate:
        if not progress.pacing:  # which says how many are at the endpoint
            parts.append(f"{progress.running:,} being computed")
        parts.append(f"{rate:,.0f} tokens/s")
    if (bounds := pacing_line(progress.pacing)) is not None:
        parts.append(bounds)
    if progress.cost is not None and (progress.cost or progress.budget is not None):
        parts.append(_money(progress.cost) + ("" if progress.budget is None else f" of {_money(progress.budget)}"))
    if progress.budget_covers is not None:
        parts.append(f"which is enough for about {counted(progress.budget_covers, 'line')}")
    if progress.seconds_left is not None and progress.seconds_left >= _LEAST_LEFT:
        parts.append(f"{duration(progress.seconds_left)} left{_interval(progress.seconds_left_between)}")
    if progress.waiting is not None:
        parts.append(f"waiting: {progress.waiting}")
    return ": " + ", ".join(parts)


def _interval(between: tuple[float, float] | None) -> str:
    """Return the interval around the time left, unless it says no more than that itself."""
    if between is None:
        return ""
    low, high = map(duration, between)
    return "" if low == high else f" ({low} to {high})"


def duration(seconds: float) -> str:
    """Return a time as `1:02:03` or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class TerminalProgress:
    """Progress as a bar with a line of figures below it, drawn a few times a second within `with view.bar`."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._clock = clock or MonotonicClock()
        self._rates = ThroughputMeter()
        self._first_failure = FirstFailure()
        self._last = -_SECONDS_BETWEEN_DRAWINGS
        self._drawn: tuple[str, str | None] = ("", None)
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[share]}")
        self._progress = Progress(*columns, console=console)
        self._standing = Text("", style="dim")
        # Figures that do not fit into one line go on in the next, however narrow the terminal is.
        self.bar = Live(Group(self._progress, self._standing), console=console, transient=True, refresh_per_second=8)
        self._task = self._progress.add_task("", total=None, share="")
        self._kept: str | None = None
        """What was said of the cluster, which stays on the screen."""

    def __call__(self, progress: RunProgress) -> None:
        now = self._clock.now()
        rate = self._rates.of(progress, now)
        if (failure := self._first_failure.of(progress)) is not None:
            self.bar.console.print(Text(failure))
        if progress.detail != self._kept and (progress.detail or "").startswith(JOINED):
            self._kept = progress.detail
            self.bar.console.print(Text(f"batchwright: {self._kept}"))
        drawn = progress.phase, progress.detail
        if drawn == self._drawn and now - self._last < _SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn, self._last = drawn, now
        is_running = progress.phase == "running"
        fraction = self._fraction(progress)
        self._progress.update(
            self._task,
            description=_PHASES[progress.phase],
            total=1.0 if is_running else None,
            completed=fraction if is_running else 0.0,
            share=f"{fraction:.0%}" if is_running else "",
        )
        self._standing.plain = _standing(progress, rate).removeprefix(": ")

    @staticmethod
    def _fraction(progress: RunProgress) -> float:
        """The share of the bar that is full: by lines of earlier runs, and by the work of this one."""
        before = progress.resumed / progress.total if progress.total else 0.0
        if progress.fraction is None:
            return progress.done / progress.total if progress.total else 0.0
        return before + (1.0 - before) * progress.fraction


def report_table(report: RunReport) -> Table:
    """Return what a run did, one figure per line; those of the engine only if it computed something."""
    end = "Interrupted" if report.interrupted else "Done" if report.done == report.total else "Stopped"
    lines = f"{report.done:,} of {counted(report.total, 'line')}"
    title = f"{end}: {lines}, {report.failed:,} failed, {report.resumed:,} by earlier runs"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.min_width = len(title)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    loading = f", of which loading the model {report.load_seconds:.1f} s" if report.steps else ""
    table.add_row("wall time", f"{report.wall_seconds:.1f} s{loading}")
    for name, value in [
        *_token_rows(report),
        *_saving_rows(report),
        *_money_rows(report),
        *pacing_rows(report.pacing),
        *(_engine_rows(report) if report.steps else []),
    ]:
        table.add_row(name, value)
    if report.batches is not None:
        table.add_row("batches", _batches_row(report.batches))
    memory = _size(report.peak_memory_bytes)
    if report.peak_gpu_bytes is not None:
        memory += f", {_size(report.peak_gpu_bytes)} on the GPU"
    table.add_row("peak memory", memory)
    return table


_SHOWN_BATCHES = 10


def _batches_row(batches: dict[str, Any]) -> str:
    """Return what became of the batches of a provider, and of their lines."""
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
    """Return the failed lines by code, with an example of each."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), title="Failed lines, with an example of each code", title_justify="left"
    )
    table.add_column("lines", justify="right")
    table.add_column("code", no_wrap=True)
    table.add_column("example", justify="right", no_wrap=True)
    table.add_column()
    for failure in report.failures:
        message = " ".join(failure.message.split())
        shown = message if len(message) <= _MESSAGE_SHOWN else message[:_MESSAGE_SHOWN] + "…"
        table.add_row(f"{failure.count:,}", Text(failure.code), f"line {failure.line:,}", Text(shown))
        if len(failure.lines) > 1:
            table.add_row("", "", "", Text(_lines_of(failure), style="dim"))
    return table


def _lines_of(failure: Failure) -> str:
    """The numbers of the first lines that failed with a code."""
    numbers = failure.lines[:_NUMBERS_SHOWN]
    more = failure.count - len(numbers)
    return f"lines {', '.join(map(str, numbers))}" + (f", and {more:,} more" if more else "")


def show_plan(console: Console, report: RunReport, *, is_paid: bool = False) -> None:
    """Print what a dry run found. `is_paid`: an endpoint elsewhere computes the lines."""
    about = "" if any(request.text is not None for request in report.first_requests) else "about "
    identical = f", {report.deduplicated:,} are identical to others and asked with them" if report.deduplicated else ""
    console.print(
        f"Dry run: {counted(report.total, 'line')}, {report.failed:,} of them would fail{identical}; "
        f"{about}{counted(report.prompt_tokens, 'prompt token')}. Nothing was computed.",
        highlight=False,
    )
    if report.planned_answers is not None:
        console.print(_work_planned(report.planned_answers), highlight=False)
    if report.reordered_fields is not None:
        console.print(f"{_reordered(report.reordered_fields)}.", highlight=False)
    if report.planned_time is not None:
        console.print(_time_planned(report.planned_time), highlight=False)
    if report.shared_prompts is not None and report.shared_prompts.beginnings:
        console.print(_shared(report.shared_prompts, report.prompt_tokens))
    if report.planned_cost is not None:
        for text in _planned_cost(report.planned_cost, report.total - report.failed - report.deduplicated):
            console.print(text, highlight=False)
    elif is_paid and report.failed < report.total:
        console.print(
            "What it would cost is not known: no table has the prices of this endpoint and model; give them"
            " with --price or --prices.",
            highlight=False,
        )
    for request in report.first_requests:
        name = f"line {request.line:,} ({request.custom_id})"
        console.print(
            Text(f"\n{name}: {request.endpoint}, {about}{counted(request.prompt_tokens, 'prompt token')}", style="bold")
        )
        console.print(Text(_shortened(json.dumps(dict(request.body), ensure_ascii=False))))
        if request.text is not None:
            console.print(Text(_shortened(request.text.rstrip("\n")), style="dim"))
    if report.failures:
        console.print(failures_table(report))


def _shortened(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= 2 * _SHOWN_OF_TEXT:
        return text
    left_out = len(text) - 2 * _SHOWN_OF_TEXT
    return f"{text[:_SHOWN_OF_TEXT]} [… {left_out:,} characters …] {text[-_SHOWN_OF_TEXT:]}"


def _work_planned(answers: AnswersPlanned) -> str:
    text = f"At most {counted(answers.at_most, 'token')} are generated"
    if answers.kv_tokens:
        text += f"; prompts and answers take at most {answers.kv_tokens:,} tokens of the KV cache at a time"
    return f"{text}."


def _time_planned(time: PlannedTime) -> str:
    seconds, least, most = map(_rounded, (time.seconds, *time.between))
    if time.lengths_from == "limits":
        return (
            f"It takes between about {least} and {most} on this machine once the model is loaded: how long answers of"
            " this model are is not known yet."
        )
    runs = counted(time.runs, "earlier run")
    lengths = {
        "lines": "with answers as long as the lines say",
        "same job": f"with answers as in {runs} of this job",
        "same templates": f"with answers as in {runs} with these templates",
        "earlier runs": f"with answers as in {runs} of the model",
    }
    return (
        f"It takes about {seconds} on this machine once the model is loaded ({least} to {most} in nine "
        f"cases of ten), {lengths[time.lengths_from]}."
    )


def _rounded(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.1f} s" if seconds < 10.0 else f"{seconds:.0f} s"
    return duration(seconds)


def _reordered(reuse: FieldReuse) -> str:
    return (
        f"{reuse.after:.0%} of the fields' text begins as in an earlier row, of {reuse.rows:,} compared; in the order"
        f" of the template it would be {reuse.before:.0%}"
    )


def _shared(shared: SharedPrompts, prompt_tokens: int) -> Tree:
    """The beginnings that prompts share, with what each saves."""
    share, by_input = (
        tokens / max(1, prompt_tokens) for tokens in (shared.shared_tokens, shared.shared_in_input_order)
    )
    root = Tree(
        f"{share:.0%} of the prompt tokens are shared beginnings, computed once; in the order of the input, the cache "
        f"would find {by_input:.0%}:"
    )
    _grow(root, shared.beginnings)
    return root


def _grow(tree: Tree, beginnings: Sequence[SharedBeginning]) -> None:
    for each in beginnings:
        text = Text(f"{each.lines:,} lines, about {each.tokens:,} tokens, {each.saved_tokens:,} saved  ")
        text.append(" ".join(each.text.split())[:_SHOWN_OF_BEGINNING], style="dim")
        _grow(tree.add(text), each.inside)


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as `1 line` and `1,200 lines`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


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
    """What a cache of prompts elsewhere and identical lines saved."""
    rows = []
    if report.reordered_fields is not None:
        rows.append(("fields", _reordered(report.reordered_fields)))
    is_priced = report.spending is not None and report.spending.cached_tokens > 0
    if report.cached_tokens and not report.steps and not is_priced:
        rows.append(("prompt cache", f"{report.cached_share:.1%} of the prompt tokens found in it"))
    if report.deduplicated:
        saved = f"{report.saved_prompt_tokens:,} prompt and {report.saved_generated_tokens:,} generated tokens saved"
        rows.append(("identical", f"{counted(report.deduplicated, 'line')} asked once with others, {saved}"))
    if report.asked_again:
        rows.append(("asked again", f"{counted(report.asked_again, 'time')}, as answers were no JSON"))
    return rows


def _money(dollars: float) -> str:
    return shown_dollars(round(dollars * DOLLAR))


def _not_known(spending: Spending) -> str:
    """What may have to be paid besides what answers cost."""
    text = ""
    for number, noun, where, most in (
        (spending.unknown_requests, "request", "whose cost is not known", spending.unknown_at_most),
        (spending.in_batches, "line", "in batches at the provider", spending.in_batches_at_most),
    ):
        if number:
            amount = "an unknown amount" if most is None else f"at most {_money(most)}"
            text += f"; {amount} more for {counted(number, noun)} {where}"
    return text


def paid_so_far(report: RunReport) -> str:
    """Return what an interrupted run left under way at an endpoint, and what the job has cost, each in a line."""
    text = ""
    if report.cut_off:
        were = "was" if report.cut_off == 1 else "were"
        text += f"\n{counted(report.cut_off, 'request')} {were} under way: what they answer is lost, and may be paid."
    if report.spending is not None:
        text += f"\nPaid so far: {_money(report.spending.cost_of_all_runs)}{_not_known(report.spending)}."
    return text


def _money_rows(report: RunReport) -> list[tuple[str, str]]:
    rows = []
    spending = report.spending
    if spending is not None:
        cost = f"{_money(spending.cost)} in this run, {_money(spending.cost_of_all_runs)} in all runs"
        if spending.budget is not None:
            cost += f", of {_money(spending.budget)}"
        cost += _not_known(spending)
        if spending.unpriced_requests:
            cost += f"; without {counted(spending.unpriced_requests, 'request')} whose price is not known"
        rows.append(("cost", cost))
        if spending.cached_tokens:
            found = f"{spending.cached_share:.1%} of the prompt tokens found in it"
            rows.append(("prompt cache", f"{found}, {_money(spending.saved_by_caching)} saved"))
        if spending.saved_by_batching:
            rows.append(("provider's batches", f"{_money(spending.saved_by_batching)} saved"))
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


def _planned_cost(planned: PlannedCost, lines: int) -> list[str]:
    """Return what a job would cost, live and as a batch of the provider."""
    of = "" if planned.lines == lines else f" for the {counted(planned.lines, 'line')} whose price is known"
    rows = []
    for name, price in (("live", planned.live), ("as a batch", planned.batch)):
        text = f"Price {name}{of}: "
        if price.expected is not None:
            text += f"about {_money(price.expected)}, by the answers so far"
        else:
            text += f"about {_money(price.prompts)} for the prompts"
            if price.answers_per_100_tokens:
                answers = _money(price.answers_per_100_tokens)
                text += f", and {answers} for the answers if each has 100 tokens or its limit"
        reserved = "" if price.at_most is None else f"; a budget reserves {_money(price.at_most)}"
        rows.append(f"{text}{reserved}.")
    if planned.no_bound is not None:
        rows.append(f"It has no upper bound: {planned.no_bound}.")
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


_LOST = {
    "tail": "waiting for the tail",
    "attention": "attention",
    "products": "matrix products",
    "recomputation": "computed again or in vain",
    "host": "host",
    "other": "rest of the model",
}
_LEAST_LOST = 0.005
"""Share of the time that is shown."""


def _bound_rows(report: RunReport) -> list[tuple[str, str]]:
    """How close the run came to what this machine can do, and what the rest of its time went into."""
    if report.share_of_bound is None or report.bound is None:
        return []
    lost = sorted(report.bound["lost"].items(), key=lambda each: -each[1])
    parts = [f"{share:.0%} {_LOST[name]}" for name, share in lost if share >= _LEAST_LOST]
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
