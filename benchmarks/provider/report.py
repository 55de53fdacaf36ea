"""The tables, the bars and the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.provider.clients import OURS
from benchmarks.provider.measures import Measures
from benchmarks.provider.runs import Run
from benchmarks.provider.scenarios import SCENARIOS
from benchmarks.provider.sweep import FIRST, Swept
from benchmarks.throughput.report import machine, table

_INTRODUCTION = """\
A file of chats sent to a provider on loopback whose limits follow the published descriptions of \
OpenAI's, Anthropic's, Azure's and Groq's; printed by `benchmarks/providers.py` on {date}. {processor}, {cores} cores, \
Python {python}; {side} clients side by side, each with a provider of its own. What is compared and how to repeat it: \
[benchmarks/README.md](../README.md#providers-with-limits).

All figures come from the provider's own record of its requests. The clairvoyant client knows all limits and all \
answers beforehand, and sends each request in the moment in which it is admitted. Share: of the tokens that it has \
when it is done, those that the client had by then (fixed, sliding: by the end of that window). Makespan: seconds \
until the last line is answered, over its own. 429s: refusals for each 1,000 requests, without those at random. To the \
rate: seconds until 90% of its admissions, over 10 s. Paid twice: payments for lines whose answer had been sent \
already. Not answered: lines without an answer in the client's output."""

_SWEPT_INTRODUCTION = """\
Generated tokens per second of `batchwright run --backend` with servers of models, beside those of a loop around \
aiohttp with fixed numbers of requests under way; printed by `benchmarks/providers.py --section endpoints` on {date}. \
{processor}, {cores} cores, Python {python}. {lines:,} lines with 16 to 64 tokens to generate, {rounds} \
rounds in turn, medians. Rates are those after the first tenth of the tokens: what ours has to find \
out is found by then, or it costs."""

_OF_BEST = 0.97
_SHARE, _REFUSED_HEADERS, _REFUSED_BLIND, _MAKESPAN = 0.97, 5.0, 20.0, 1.05
_NONE = "-"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All clients with one provider and one knowledge of its limits."""

    scenario: str
    configured: bool
    headers: bool
    lines: int
    makespan: float
    """Seconds of the clairvoyant client."""
    runs: Sequence[Run]

    @property
    def title(self) -> str:
        """A heading."""
        known = "configured" if self.configured else "not configured"
        return f"{self.scenario}: {SCENARIOS[self.scenario].title}; {known}, {'' if self.headers else 'no '}headers"

    @property
    def most_refused(self) -> float:
        """The bar for refusals per 1,000 requests."""
        return _REFUSED_HEADERS if self.headers else _REFUSED_BLIND


def comparison_table(comparison: Comparison) -> str:
    """One row for each client."""
    head = ["client", "share", "makespan", "429s", "to the rate, s", "paid twice", "not answered", "$"]
    return table(head, [_row(run) for run in comparison.runs])


def _row(run: Run) -> list[str]:
    got = run.measures
    if got is None:
        return [run.system.title, *[_NONE] * 7]
    return [
        run.system.title,
        f"{got.share:.1%}",
        _NONE if got.makespan is None else f"{got.makespan:.2f}",
        f"{got.refused_per_thousand:.1f}",
        _NONE if got.to_rate is None else f"{got.to_rate:.1f}",
        str(got.paid_twice),
        str(got.lines - got.written),
        f"{got.dollars:.2f}",
    ]


def bars(comparisons: Sequence[Comparison]) -> str:
    """Whether ours met its bars, where it did not, and where another is better."""
    ours = [(each, got) for each in comparisons if (got := _of(each, OURS)) is not None]
    checks: Mapping[str, Callable[[Comparison, Measures], tuple[bool, str]]] = {
        f"At least {_SHARE:.0%} of the allowed tokens": lambda _, got: (got.share >= _SHARE, f"{got.share:.1%}"),
        f"Makespan at most {_MAKESPAN:g} times the clairvoyant client's": lambda _, got: (
            got.makespan is not None and got.makespan <= _MAKESPAN,
            _NONE if got.makespan is None else f"{got.makespan:.2f}",
        ),
        f"Fewer than {_REFUSED_HEADERS:g} 429s for 1,000 requests with headers, {_REFUSED_BLIND:g} without": (
            lambda each, got: (got.refused_per_thousand < each.most_refused, f"{got.refused_per_thousand:.1f}")
        ),
        "No line is paid twice": lambda _, got: (got.paid_twice == 0, str(got.paid_twice)),
        "Every line is answered": lambda _, got: (got.written == got.lines, f"{got.lines - got.written} are not"),
    }
    lines = []
    for name, check in checks.items():
        judged = [(each, *check(each, got)) for each, got in ours]
        missed = [f"{_short(each)} ({shown})" for each, held, shown in judged if not held]
        if not judged:
            continue
        verdict = f"**not met** in {len(missed)} of {len(judged)}: {', '.join(missed)}" if missed else "**met**"
        lines.append(f"- {name}: {verdict}{'' if missed else f' ({len(judged)} of {len(judged)})'}.")
    failed = [_short(each) for each in comparisons if any(_failed(run) for run in each.runs)]
    if failed:
        lines.insert(0, f"- Ours could not do the job in {len(failed)} of {len(comparisons)}: {', '.join(failed)}.")
    return "\n".join([*lines, *_better(comparisons)])


def _failed(run: Run) -> bool:
    return run.system.name == OURS and run.measures is None


def _better(comparisons: Sequence[Comparison]) -> list[str]:
    """Where another client delivers more, or is refused less while it delivers as much."""
    found = []
    for each in comparisons:
        own = _of(each, OURS)
        for run in each.runs:
            got = run.measures
            if own is None or got is None or run.system.name == OURS:
                continue
            if got.share > own.share + 0.001:
                found.append(f"{_short(each)}: {run.system.title} delivers {got.share:.1%}, ours {own.share:.1%}")
            elif got.share >= own.share - 0.001 and got.refused_per_thousand < own.refused_per_thousand:
                refused = f"{got.refused_per_thousand:.1f} 429s, ours {own.refused_per_thousand:.1f}"
                found.append(f"{_short(each)}: {run.system.title} has {refused}")
    if all(run.system.name == OURS for each in comparisons for run in each.runs):
        return []
    if not found:
        return ["- Another client is better: nowhere."]
    return [f"- Another client is better in {len(found)} places:", *(f"  - {each}" for each in found)]


def _of(comparison: Comparison, name: str) -> Measures | None:
    return next((run.measures for run in comparison.runs if run.system.name == name), None)


def _short(comparison: Comparison) -> str:
    known = "configured" if comparison.configured else "unconfigured"
    return f"{comparison.scenario} {known}{'+headers' if comparison.headers else ''}"


def settings_list(comparison: Comparison) -> str:
    """The settings of each client, and why one has no figures."""
    return "\n".join(f"- {run.system.title}: {run.settings}" for run in comparison.runs)


def section(comparison: Comparison) -> str:
    """The table of one comparison, with the settings."""
    job = f"{comparison.lines:,} lines, {comparison.makespan:.0f} s for the clairvoyant client."
    parts = [f"## {comparison.title}", job, comparison_table(comparison), settings_list(comparison)]
    return "\n\n".join(parts)


def swept_table(swept: Sequence[Swept]) -> str:
    """Tokens per second with each fixed number of requests under way, and ours."""
    levels = list(swept[0].fixed)
    head = ["server", *(str(level) for level in levels), "ours", "over the best"]
    rows = [
        [
            each.title,
            *(f"{statistics.median(each.fixed[level]):,.0f}" for level in levels),
            f"{statistics.median(each.ours):,.0f}",
            f"{each.ratio:.2f}",
        ]
        for each in swept
    ]
    return table(head, rows)


def swept_bars(swept: Sequence[Swept]) -> str:
    """Whether ours reached the rate of the best fixed number."""
    return "\n".join(
        f"- {each.title}: at least {_OF_BEST:.0%} of what {each.best} requests under way give, after the first "
        f"{FIRST:.0%} of the job: **{'met' if each.ratio >= _OF_BEST else 'not met'}** ({each.ratio:.1%})."
        for each in swept
    )


def swept_page(swept: Sequence[Swept], *, lines: int, rounds: int) -> str:
    """The report on model servers as a Markdown document."""
    host = machine()
    introduction = _SWEPT_INTRODUCTION.format(
        date=host["date"],
        processor=host["processor"],
        cores=host["cores"],
        python=host["python"],
        lines=lines,
        rounds=rounds,
    )
    return "\n\n".join(["# Requests under way", introduction, swept_table(swept), swept_bars(swept)]) + "\n"


def page(comparisons: Sequence[Comparison], side: int) -> str:
    """The whole report as a Markdown document."""
    host = machine()
    introduction = _INTRODUCTION.format(
        date=host["date"], processor=host["processor"], cores=host["cores"], python=host["python"], side=side
    )
    parts = ["# Providers with limits", introduction, bars(comparisons), *(section(each) for each in comparisons)]
    return "\n\n".join(parts) + "\n"
