"""The progress and the report of a run, as they are shown."""

from __future__ import annotations

import io
from dataclasses import replace
from types import FunctionType

import pytest
from rich.console import Console

from batchwright.cli.plan_views import show_plan
from batchwright.cli.progress_views import LogProgress, TerminalProgress, progress_view
from batchwright.cli.quantities import counted, duration
from batchwright.cli.report_views import batches_left, failures_table, paid_so_far, report_table
from batchwright.clock import ManualClock
from batchwright.engine.engine_stats import EngineStats
from batchwright.jobs.dry_run import PlannedRequest
from batchwright.jobs.failures import Failure, Failures
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.loop import Tally
from batchwright.jobs.prompt_survey import SharedPrefix, SharedPrompts
from batchwright.jobs.report import RunReport
from batchwright.jobs.spending import PlannedCost, PlannedPrice, Spending
from batchwright.pacing.figures import PacerFigures


def running(done: int, tokens: int) -> RunProgress:
    return RunProgress(
        "running", None, 1000, done - 1, 1, resumed=100, running=8, generated_tokens=tokens,
        seconds_left=80.0, fraction=(done - 100) / 900,
    )  # fmt: skip


def test_what_is_done_while_a_model_is_loaded_is_said() -> None:
    stream = io.StringIO()
    LogProgress(stream, ManualClock())(RunProgress("loading", "measuring what steps take, once"))
    assert stream.getvalue() == "batchwright: loading the model: measuring what steps take, once\n"


def test_log_lines_at_each_phase_and_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), ManualClock()
    log = LogProgress(stream, clock)
    log(RunProgress("reading"))
    log(RunProgress("loading", None, 1000, 99, 1, resumed=100))
    for second in range(21):
        log(running(100 + 9 * second, 500 * second))
        clock.advance(1.0)
    others = "1 failed, 100 by earlier runs"
    assert stream.getvalue().splitlines() == [
        "batchwright: reading the input",
        f"batchwright: loading the model: 100 of 1,000 lines done, {others}",
        f"batchwright: running: 100 of 1,000 lines done, {others}, 1:20 left",
        f"batchwright: running: 190 of 1,000 lines done, {others}, 8 being computed, 500 tokens/s, 1:20 left",
        f"batchwright: running: 280 of 1,000 lines done, {others}, 8 being computed, 500 tokens/s, 1:20 left",
    ]


@pytest.mark.parametrize("width", [62, 80, 200])
def test_a_terminal_gets_a_bar_and_all_figures(width: int) -> None:
    stream, clock = io.StringIO(), ManualClock()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    show = TerminalProgress(console, clock)
    with show.bar:
        show(RunProgress("reading"))
        show(RunProgress("loading", "compiling kernels: 1 of 4", 1000))
        assert "compiling kernels: 1 of 4" in shown_by(show)
        show(running(100, 0))
        clock.advance(10.0)
        show(running(200, 5000))
        assert "200 of 1,000 lines done, 1 failed, 100 by earlier runs, 8 being computed, 500 tokens/s, 1:20 left" in (
            shown_by(show)
        )
        assert "running" in shown_by(show)
        assert "20%" in shown_by(show)


def shown_by(view: TerminalProgress) -> str:
    """Return all that the view shows, in one line."""
    width = view.bar.console.width
    stream = io.StringIO()
    Console(file=stream, width=width).print(view.bar.get_renderable())
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return " ".join(" ".join(lines).split())


def test_the_first_failure_is_told_once() -> None:
    stream = io.StringIO()
    log = LogProgress(stream, ManualClock())
    failed = RunProgress("running", total=3, failed=1, first_failure=Failure("bad", 1, 2, "x", "no\ngood"))
    log(failed)
    log(failed)
    assert stream.getvalue().count("batchwright: line 2 (x) failed: bad: no good\n") == 1


def test_failures_are_shown_by_code() -> None:
    failures = [Failure("b", 1200, 7, "seven", "m" * 500), Failure("a", 1, 2, "two", "[red]no[/]")]
    written = io.StringIO()
    Console(file=written, width=100).print(failures_table(RunReport(output="o", model="m", total=1, failures=failures)))
    assert "1,200  b      line 7  mmm" in written.getvalue()
    assert "lines 7, " not in written.getvalue()
    assert "[red]no[/]" in written.getvalue()
    assert [counted(number, "line") for number in (0, 1, 1200)] == ["0 lines", "1 line", "1,200 lines"]


def test_the_numbers_of_failed_lines_are_shown() -> None:
    failures = Failures()
    for line in range(1, 131):
        failures.add(line, f"c{line}", {"code": "bad" if line % 10 else "worse", "message": "no"})
    found = [*failures]
    assert [(each.code, each.count, len(each.lines)) for each in found] == [("bad", 117, 100), ("worse", 13, 13)]
    written = io.StringIO()
    report = RunReport(output="o", model="m", total=130, failures=found)
    Console(file=written, width=100).print(failures_table(report))
    assert "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, and 107 more" in written.getvalue()
    assert "lines 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, and 3 more" in written.getvalue()


@pytest.mark.parametrize(("terminal", "quiet", "kind"), [
    (True, False, TerminalProgress), (False, False, LogProgress), (True, True, FunctionType),
])  # fmt: skip
def test_which_view(terminal: bool, quiet: bool, kind: type) -> None:
    with progress_view(Console(file=io.StringIO(), force_terminal=terminal), quiet=quiet) as show:
        assert isinstance(show, kind)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def shown(stats: EngineStats) -> dict[str, str]:
    """Return the lines below the title by their names."""
    tally = Tally(prompt_tokens=1200, generated_tokens=40)
    report = RunReport.of_run(tally, stats, loop_seconds=2.0, model_seconds=1.5, output="out", model="m", total=2)
    written = io.StringIO()
    Console(file=written, width=120).print(report_table(report))
    rows = [line.partition("  ") for line in written.getvalue().splitlines()[1:]]
    return {name: value.strip() for name, _, value in rows}


def test_figures_of_the_engine_are_shown_when_it_computed() -> None:
    assert [*shown(EngineStats())] == ["wall time", "tokens", "generated", "peak memory"]
    lines = shown(EngineStats(steps=7, occupancy_sum=21, occupancy_peak=5, max_num_seqs=8, kv_blocks=4))
    assert lines["occupancy"] == "3.0 sequences in a step, peak 5 of 8, 7 steps"
    assert lines["tokens"] == "1,200 prompt, 40 generated"
    assert lines["outside model"] == "0.50 s (25% of the loop)"
    assert lines["TTFT"] == "none"


def test_guessed_tokens_are_shown_when_there_were_any() -> None:
    assert "drafting" not in shown(EngineStats(steps=1))
    lines = shown(EngineStats(steps=1, drafted_tokens=1377, accepted_tokens=1204))
    assert lines["drafting"] == "1,204 of 1,377 guessed tokens were right"


def test_what_was_saved_at_an_endpoint_is_in_the_report() -> None:
    tally = Tally(prompt_tokens=4000, generated_tokens=10, cached_tokens=3000)
    for _ in range(2):
        tally.deduplicate({"usage": {"prompt_tokens": 1200, "completion_tokens": 7}})
    report = RunReport.of_run(
        tally, EngineStats(), loop_seconds=1.0, model_seconds=0.0, output="o", model="m", total=9, succeeded=9
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(report_table(report))
    assert isinstance(console.file, io.StringIO)
    shown = " ".join(console.file.getvalue().split())
    assert "prompt cache 75.0% of the prompt tokens found in it" in shown
    assert "identical 2 lines computed once with others, 2,400 prompt and 14 generated tokens saved" in shown
    assert (report.prompt_tokens, report.cached_share, report.deduplicated) == (4000, 0.75, 2)


def printed(table: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=300).print(table)
    return " ".join(stream.getvalue().split())


def test_the_cost_so_far() -> None:
    stream = io.StringIO()
    log = LogProgress(stream, ManualClock())
    log(RunProgress("running", total=10, cost=0.0))
    log(RunProgress("stopping", total=10, cost=1.234))
    log(RunProgress("finishing", total=10, cost=0.0, budget=5.0))
    log(RunProgress("running", total=10, cost=0.0, unknown_requests=2))
    assert [line.partition("done")[2] for line in stream.getvalue().splitlines()] == [
        "",
        ", $1.23",
        ", $0.00 of $5.00",
        ", $0.00 and 2 requests of unknown cost",
    ]


def test_what_a_run_cost_and_what_was_saved() -> None:
    spending = Spending(
        cost=1.5,
        cost_of_all_runs=4.98,
        unknown_at_most=0.25,
        unknown_requests=2,
        in_batches_at_most=0.75,
        in_batches=9,
        budget=5.0,
        saved_by_caching=0.5,
        saved_by_batching=2.0,
        cached_tokens=620,
        cached_share=0.62,
        unpriced_requests=0,
    )
    report = RunReport(output="o", model="m", total=9, spending=spending, longest_answer=212, unreached_limit=4096)
    shown = printed(report_table(report))
    for text in (
        "cost $1.50 in this run, $4.98 in all runs, of $5.00; at most $0.25 more for 2 requests",
        "at most $0.75 more for 9 lines in batches at the provider",
        "prompt cache 62.0% of the prompt tokens found in it, $0.50 saved",
        "provider's batches $2.00 saved",
        "max_tokens no answer needed more than 212 of its 4,096 tokens: a lower limit reserves less",
    ):
        assert text in shown
    near = RunReport(output="o", model="m", total=9, longest_answer=3000, unreached_limit=4096)
    assert "max_tokens" not in printed(report_table(near))
    assert "cost" not in printed(report_table(near))


def test_the_price_before_anything_is_paid() -> None:
    live, batch = PlannedPrice(3.0, 0.5, 0.25, None), PlannedPrice(1.5, 0.25, 0.125, 1.0)
    report = RunReport(output="o", model="m", total=9, planned_cost=PlannedCost(live, batch, 8))
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    assert stream.getvalue().splitlines()[1:] == [
        "Price live for the 8 lines whose price is known: about $0.50 for the prompts, and $0.25 for the "
        "answers if each has 100 tokens or its limit; a budget reserves $3.00.",
        "Price as a batch for the 8 lines whose price is known: about $1.00, by the answers so far; a budget reserves "
        "$1.50.",
    ]
    for budget, via, is_told in ((2.0, "live", True), (3.0, "live", False), (2.0, "auto", True), (2.0, "batch", False)):
        stream = io.StringIO()
        show_plan(Console(file=stream, width=300), report, is_elsewhere=True, budget=budget, via=via)
        assert (f"The budget of ${budget:.2f} is less than all lines may cost at most" in stream.getvalue()) == is_told
    endless = PlannedPrice(None, 0.5, 0.25, None)
    report = RunReport(output="o", model="m", total=9, planned_cost=PlannedCost(endless, endless, 9, "it is endless"))
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    assert "at most" not in stream.getvalue()
    assert stream.getvalue().endswith("It has no upper bound: it is endless.\n")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("[m]", "no table has prices of [m] at this endpoint; if it is paid, give prices with --price or --prices."),
        (None, "name the model with --model, or give prices with --price or --prices."),
    ],
)
def test_a_price_that_is_not_known_is_said_of_an_endpoint_elsewhere(model: str | None, told: str) -> None:
    report = RunReport(output="o", model="m", total=9)
    for is_elsewhere, failed in ((True, 0), (True, 9), (False, 0)):
        stream = io.StringIO()
        console = Console(file=stream, width=300)
        show_plan(console, replace(report, failed=failed), is_elsewhere=is_elsewhere, model=model)
        shown = stream.getvalue()
        assert (f"What it would cost is not known: {told}" in shown) == (is_elsewhere and not failed)
        assert ("Nothing was sent." if is_elsewhere else "No result was written.") in shown


def test_how_many_lines_are_identical_is_said_in_numbers_that_agree() -> None:
    for copies, told in (
        (0, "3 lines, 0 of them would fail; 5 prompt tokens."),
        (1, "fail, 1 is identical to another and computed with it; 5"),
        (2, "fail, 2 are identical to others and computed with them; 5"),
    ):
        stream = io.StringIO()
        report = RunReport(output="-", model="m", total=3, prompt_tokens=5, deduplicated=copies)
        show_plan(Console(file=stream, width=200), report)
        assert told in stream.getvalue()


def test_names_and_messages_are_no_markup() -> None:
    figures = PacerFigures(2, 0, 0, 1, found_concurrency=False, found_per_minute=None, limits=(), blocked_seconds=0.0)
    pacing = {"1 https://a/v1 [/m]": figures, "2 https://a/v1 [b]n": figures}
    shown = printed(report_table(RunReport(output="o", model="m", total=1, pacing=pacing)))
    assert "https://a/v1 [/m]: 2 requests sent" in shown
    assert "https://a/v1 [b]n: 2 requests sent" in shown
    price = PlannedPrice(None, 0.5, 0.25, None)
    report = RunReport(output="o", model="m", total=9, planned_cost=PlannedCost(price, price, 9, "a part '[/x]' :key:"))
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    assert "It has no upper bound: a part '[/x]' :key:." in stream.getvalue()


def test_control_characters_of_prompts_and_messages_are_not_sent_to_the_terminal() -> None:
    evil = "\x1b[2Ja\x9bb\x00\u2028é"
    request = PlannedRequest(1, evil, "/v1/completions", {"prompt": evil}, 3, f"one\n{evil}\ttwo")
    shared = SharedPrompts(9, 9, [SharedPrefix(lines=2, tokens=9, saved_tokens=9, example=1, text=evil)])
    failures = [Failure("bad", 1, 2, evil, evil)]
    report = RunReport(
        output="o", model="m", total=1, first_requests=[request], shared_prompts=shared, failures=failures
    )
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    log = LogProgress(stream, ManualClock())
    log(RunProgress("running", total=3, failed=1, first_failure=failures[0], waiting=evil))
    written = stream.getvalue()
    assert not {"\x1b", "\x9b", "\x00"} & {*written}
    assert written.count(r"\x1b[2Ja\x9bb\x00") >= 6
    assert "one\n" in written


def test_what_an_interrupted_run_leaves() -> None:
    spending = Spending(
        cost=1.5,
        cost_of_all_runs=4.98,
        unknown_at_most=0.25,
        unknown_requests=2,
        in_batches_at_most=None,
        in_batches=1,
        budget=None,
        saved_by_caching=0.0,
        saved_by_batching=0.0,
        cached_tokens=0,
        cached_share=0.0,
        unpriced_requests=0,
    )
    report = RunReport(output="o", model="m", total=9, spending=spending, cut_off=2)
    assert paid_so_far(report).splitlines() == [
        "",
        "2 requests were under way: what they answer is lost, and may be paid.",
        "Paid so far: $4.98; at most $0.25 more for 2 requests whose cost is not known; an unknown amount more for 1 "
        "line in batches at the provider.",
    ]
    assert paid_so_far(RunReport(output="o", model="m", total=9)) == ""
    left = {"at_provider": ["batch_1"]}
    options = ["--backend", "http://h/v1", "--api-key-env", "KEY"]
    told = batches_left(RunReport(output="o", model="m", total=9, batches=left), options)
    assert told.endswith("To cancel: batchwright batches cancel --backend http://h/v1 --api-key-env KEY batch_1")


def test_seconds_that_pass_are_no_news() -> None:
    stream, clock = io.StringIO(), ManualClock()
    log = LogProgress(stream, clock)
    for seconds in (5, 4, 3):
        log(RunProgress("running", total=9, waiting=f"1 batch at the provider, next look in {seconds} s"))
        clock.advance(1.0)
    log(RunProgress("running", total=9, waiting="2 batches to be submitted"))
    assert len(stream.getvalue().splitlines()) == 2


def test_each_error_that_lines_wait_after_is_no_news() -> None:
    stream, clock = io.StringIO(), ManualClock()
    log = LogProgress(stream, clock)
    for number in range(90):
        waiting = f"{number} to be tried again, the last after: error {'abc'[number % 3]}" if number % 2 else None
        log(RunProgress("running", total=9, waiting=waiting))
        clock.advance(0.2)
    assert len(stream.getvalue().splitlines()) == 3, "the first, the first that waits, and one after ten seconds"


def test_no_time_left_is_not_shown_of_a_run_that_goes_on() -> None:
    stream = io.StringIO()
    LogProgress(stream, ManualClock())(RunProgress("running", total=9, seconds_left=0.3, waiting="for one"))
    assert "left" not in stream.getvalue()
