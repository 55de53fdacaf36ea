"""What a plan shows: the work, the time and the price of a run that has not begun."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.text import Text
from rich.tree import Tree

from batchwright.cli.quantities import counted, duration
from batchwright.cli.report_views import failures_table, fields_in_common
from batchwright.cli.visible_text import visible
from batchwright.pricing.rates import money

if TYPE_CHECKING:
    from rich.console import Console

    from batchwright.jobs.dry_run import AnswersPlanned
    from batchwright.jobs.earlier_answers import LengthSource
    from batchwright.jobs.planned_time import PlannedTime
    from batchwright.jobs.prompt_survey import SharedPrefix, SharedPrompts
    from batchwright.jobs.report import RunReport
    from batchwright.jobs.spending import PlannedCost

_SHOWN_OF_PREFIX = 60
"""Characters of shared prefixes that are shown."""
_SHOWN_OF_TEXT = 400
"""Characters of each end of a long prompt that are shown."""


def show_plan(
    console: Console,
    report: RunReport,
    *,
    is_elsewhere: bool = False,
    model: str | None = None,
    budget: float | None = None,
    via: str = "live",
) -> None:
    """Print what a dry run found.

    `is_elsewhere`: an endpoint computes the lines with `model`, for at most `budget` dollars. `via`:
    see `run`.
    """
    nothing = "Nothing was sent." if is_elsewhere else "No result was written."
    prompts = _prompt_tokens(report.prompt_tokens, report.prompt_tokens_estimated)
    console.print(
        f"Plan: {counted(report.total, 'line')}, {report.failed:,} of them would fail{_identical(report.deduplicated)}"
        f"; {prompts}{' in the others' if report.failed else ''}. {nothing}",
        highlight=False,
    )
    if report.planned_answers is not None and (text := _work_planned(report.planned_answers, report.planned_time)):
        console.print(Text(visible(text)))
    if report.reordered_fields is not None:
        console.print(f"{fields_in_common(report.reordered_fields)}.", highlight=False)
    if report.planned_time is not None or report.no_planned_time:
        unknown = f"How long it takes is not known: {report.no_planned_time.rstrip('.')}."
        console.print(Text(visible(unknown if report.planned_time is None else _time_planned(report.planned_time))))
    if report.shared_prompts is not None and report.shared_prompts.prefixes:
        console.print(_shared(report.shared_prompts, report.prompt_tokens, is_elsewhere=is_elsewhere))
    if report.planned_cost is not None:
        for text in _planned_cost(report.planned_cost, report.total - report.failed - report.deduplicated):
            console.print(Text(visible(text)))
        # Where a deadline decides, all lines may become requests.
        price = report.planned_cost.batch if via == "batch" else report.planned_cost.live
        if budget is not None and (price.at_most or 0.0) > budget:
            console.print(
                f"The budget of {money(budget)} is less than all lines may cost at most: a run may end before the "
                "last line, and goes on with a larger one.",
                highlight=False,
            )
    elif is_elsewhere and report.failed < report.total:
        console.print(Text(_price_unknown(model)))
    for request in report.first_requests:
        name = visible(f"line {request.line:,} ({request.custom_id})")
        console.print(
            Text(
                f"\n{name}: {request.endpoint}, {_prompt_tokens(request.prompt_tokens, request.is_estimate)}",
                style="bold",
            )
        )
        console.print(Text(_shortened(visible(json.dumps(dict(request.body), ensure_ascii=False)))))
        if request.text is not None:
            console.print(Text(_shortened(visible(request.text.rstrip("\n"))), style="dim"))
    if report.failures:
        console.print(failures_table(report))


def _identical(lines: int) -> str:
    if lines == 1:
        return ", 1 is identical to another and computed with it"
    return f", {lines:,} are identical to others and computed with them" if lines else ""


def _prompt_tokens(tokens: int, is_estimate: bool) -> str:
    return f"{'about ' if is_estimate else ''}{counted(tokens, 'prompt token')}"


def _shortened(text: str) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= 2 * _SHOWN_OF_TEXT:
        return text
    left_out = len(text) - 2 * _SHOWN_OF_TEXT
    return f"{text[:_SHOWN_OF_TEXT]} [… {left_out:,} characters …] {text[-_SHOWN_OF_TEXT:]}"


def _work_planned(answers: AnswersPlanned, time: PlannedTime | None) -> str:
    """Return what is said about the answers; empty if nothing is known."""
    parts = []
    if answers.expected is not None:
        parts.append(f"about {_generated(answers.expected)}")
    if answers.at_most is not None:
        parts.append(f"at most {answers.at_most:,}" if parts else f"at most {_generated(answers.at_most)}")
    text = ", ".join(parts)
    if text and answers.kv_tokens:
        most = f"at most {'about ' if answers.kv_is_estimate else ''}{answers.kv_tokens:,}"
        if time is None or time.kv_tokens is None:
            text += f"; prompts and answers take {most} tokens of the KV cache at a time"
        else:
            about = counted(min(time.kv_tokens, answers.kv_tokens), "token")
            text += f"; prompts and answers take about {about} of the KV cache at a time, {most} if nothing were shared"
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _generated(tokens: int) -> str:
    return f"{counted(tokens, 'token')} {'is' if tokens == 1 else 'are'} generated"


def _time_planned(time: PlannedTime) -> str:
    seconds, least, most = map(_rounded, (time.seconds, *time.between))
    if time.lengths_from == "limits":
        return (
            f"It takes between about {least} and {most} on this machine once the model is loaded: how long answers of"
            " this model are is not known yet."
        )
    return (
        f"It takes about {seconds} on this machine once the model is loaded ({least} to {most} in nine "
        f"cases of ten), with answers {answers_like(time.lengths_from, time.runs)}."
    )


def answers_like(lengths_from: Literal["lines"] | LengthSource, number: int) -> str:
    """Return which answers those of a job are assumed to be like; `number`: of runs, or of lines."""
    runs = counted(number, "earlier run")
    return {
        "lines": "as long as the lines say",
        "same job": f"as in {runs} of this job",
        "same templates": f"as in {runs} with these templates",
        "earlier runs": f"as in {runs} of the model",
        "probe": f"like those to {counted(number, 'line')} of it",
    }[lengths_from]


def _rounded(seconds: float) -> str:
    if seconds < 120.0:
        return f"{seconds:.1f} s" if seconds < 10.0 else f"{seconds:.0f} s"
    return duration(seconds)


def _shared(shared: SharedPrompts, prompt_tokens: int, *, is_elsewhere: bool) -> Tree:
    """The prefixes that prompts share, with what each saves."""
    if is_elsewhere:
        share = shared.provider_tokens / max(1, prompt_tokens)
        root = Tree(f"{share:.0%} of the prompt tokens are in prefixes that may be found in the provider's cache:")
        _grow(root, shared.prefixes, "may be found")
        return root
    share, by_input = (
        tokens / max(1, prompt_tokens) for tokens in (shared.shared_tokens, shared.shared_in_input_order)
    )
    text = (
        f"About {share:.0%} of the prompt tokens are shared prefixes: in the planned order each is computed once, as"
        " far as it fills blocks of the KV cache"
    )
    if shared.cache_tokens is not None:
        text += f"; in the order of the input, the cache of {shared.cache_tokens:,} tokens would find {by_input:.0%}"
    root = Tree(f"{text}:")
    _grow(root, shared.prefixes, "saved")
    return root


def _grow(tree: Tree, prefixes: Sequence[SharedPrefix], gain: str) -> None:
    for each in prefixes:
        text = Text(f"{each.lines:,} lines, about {each.tokens:,} tokens, {each.saved_tokens:,} {gain}  ")
        text.append(_both_ends(visible(each.text)), style="dim")
        _grow(tree.add(text), each.inside, gain)


def _both_ends(text: str) -> str:
    """Return the text of a prefix on one line: siblings may differ only at their ends."""
    words, half = " ".join(text.split()), _SHOWN_OF_PREFIX // 2
    return words if len(words) <= _SHOWN_OF_PREFIX else f"{words[: half - 1]} … {words[2 - half :]}"


def _price_unknown(model: str | None) -> str:
    advice = "give prices with --price or --prices"
    if model is None:
        return f"What it would cost is not known: name the model with --model, or {advice}."
    return f"What it would cost is not known: no table has prices of {model} at this endpoint; if it is paid, {advice}."


def _planned_cost(planned: PlannedCost, lines: int) -> list[str]:
    """Return what a job would cost live, with hits in the provider's cache, and as a batch of the provider."""
    of = "" if planned.lines == lines else f" for the {counted(planned.lines, 'line')} whose price is known"
    rows = []
    prices = (
        ("live", planned.live),
        ("live, with the provider's cache", planned.cached),
        ("as a batch", planned.batch),
    )
    for name, price in prices:
        if price is None:
            continue
        text = f"Price {name}{of}: "
        if price.expected is not None:
            text += f"about {money(price.expected)}, by the answers so far"
        else:
            text += f"about {money(price.prompts)} for the prompts"
            if price.answers_per_100_tokens:
                answers = money(price.answers_per_100_tokens)
                text += f", and {answers} for the answers if each has 100 tokens or its limit"
        reserved = "" if price.at_most is None else f"; a budget reserves {money(price.at_most)}"
        rows.append(f"{text}{reserved}.")
    if planned.no_bound is not None:
        rows.append(f"It has no upper bound: {planned.no_bound}.")
    return rows
