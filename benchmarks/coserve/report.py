"""The table, the bars and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.coserve.run import Outcome, Served
from benchmarks.throughput.report import machine, table

_INTRODUCTION = """\
Online requests and a batch job on one engine; printed by `benchmarks/coserving.py` on {date}. {model}, bfloat16, \
greedy, end of text ignored. {processor}, {cores} cores ({features}), Python {python}. {implementation}.

Requests and lines are alike: 30 to 150 prompt tokens, 32 to 160 generated. The job alone, without an SLO, makes \
{batch:,.0f} tokens/s: that is the capacity, {capacity:.2f} requests/s. Online requests arrive at random (Poisson) \
at {share:.0%} of it, the same ones in every run; the job has 512 lines in the engine at any time. Times are those \
of clients on the event loop of `AsyncEngine`, from the moment a request was due. TPOT is the time from the first \
token of a request to its last, over one less than its tokens; a step is the mean one of the run. Figures are of \
the {seconds:.0f} seconds after {ramp:.0f} seconds of the same traffic; loading is not in them. The SLO that is \
held against is the one given to the engine, or the first where none was given."""


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_ms: float
    tpot_ms: float

    def __str__(self) -> str:
        return f"TTFT {self.ttft_ms:g} ms, TPOT {self.tpot_ms:g} ms"


@dataclass(frozen=True, slots=True)
class Findings:
    model: str
    share: float
    job_alone: Outcome
    alone: Outcome
    """Online requests without the job."""
    together: Sequence[tuple[str, Slo, Outcome]]
    """Name, the SLO that it is compared with, and the run. The bars apply to the first one."""

    def rise(self, outcome: Outcome) -> float:
        """Increase of the p99 of the first tokens over a run without the job, in steps of the run."""
        return (p99_ttft(outcome) - p99_ttft(self.alone)) / outcome.step_ms

    def goodput(self, outcome: Outcome) -> float:
        """Batch tokens/s, divided by what online traffic leaves of the rate of the job alone."""
        return outcome.batch_rate / (self.job_alone.batch_rate - outcome.online_rate)


def p99_ttft(outcome: Outcome) -> float:
    return percentile(outcome.served, "ttft_ms", 99)


def percentile(served: Sequence[Served], name: str, q: float) -> float:
    return float(np.percentile([getattr(each, name) for each in served], q))


def runs_table(findings: Findings) -> str:
    first = findings.together[0][1]
    rows = [
        _row(findings, "online alone", first, findings.alone),
        *(_row(findings, name, slo, outcome) for name, slo, outcome in findings.together),
    ]
    return table(
        [
            "run",
            "requests",
            "met both",
            "TTFT p50, ms",
            "p99",
            "rise of p99, steps",
            "TPOT p50, ms",
            "p99",
            "step, ms",
            "online tokens/s",
            "batch tokens/s",
            "of what is left",
        ],
        rows,
    )


def bars_list(findings: Findings) -> str:
    _, slo, outcome = findings.together[0]
    met, rise, goodput = outcome.within(slo.ttft_ms, slo.tpot_ms), findings.rise(outcome), findings.goodput(outcome)
    return "\n".join(
        [
            f"- {_mark(met >= 0.99)} At least 99% of the online requests meet the SLO ({slo}): {met:.1%}.",
            f"- {_mark(rise <= 2.0)} The job adds at most two steps to the p99 of TTFT: {rise:.2f}.",
            f"- {_mark(goodput >= 0.8)} The job makes at least 80% of the tokens/s that online traffic leaves:"
            f" {goodput:.0%}.",
        ]
    )


def page(findings: Findings, plot: str) -> str:
    """The whole report as a Markdown document; `plot` is the name of the picture beside it."""
    host, setting = machine(), findings.alone.setting
    introduction = _INTRODUCTION.format(
        date=host["date"],
        model=findings.model,
        processor=host["processor"],
        cores=host["cores"],
        features=", ".join(host["features"]),
        python=host["python"],
        implementation=findings.alone.implementation,
        batch=findings.job_alone.batch_rate,
        capacity=setting.rate / findings.share,
        share=findings.share,
        seconds=setting.seconds,
        ramp=setting.ramp,
    )
    parts = ["# Two classes of traffic on one engine", introduction, runs_table(findings), bars_list(findings)]
    parts += [learned(findings), f"![Distributions of TTFT and TPOT, and tokens/s, of each run]({plot})"]
    return "\n\n".join(parts) + "\n"


def learned(findings: Findings) -> str:
    """What the runs cost besides their tokens."""
    parts = [
        f"{name}: margin {outcome.margin - 1:.1%}, {outcome.preemptions} preemptions"
        for name, _, outcome in findings.together
    ]
    return f"Learned margin of a step's time, and preemptions in the window: {'; '.join(parts)}."


def _row(findings: Findings, name: str, slo: Slo, outcome: Outcome) -> list[str]:
    with_job = outcome.setting.job
    return [
        name,
        str(len(outcome.served)),
        f"{outcome.within(slo.ttft_ms, slo.tpot_ms):.1%}",
        f"{percentile(outcome.served, 'ttft_ms', 50):.0f}",
        f"{p99_ttft(outcome):.0f}",
        f"{findings.rise(outcome):.2f}" if with_job else "",
        f"{percentile(outcome.served, 'tpot_ms', 50):.1f}",
        f"{percentile(outcome.served, 'tpot_ms', 99):.1f}",
        f"{outcome.step_ms:.1f}",
        f"{outcome.online_rate:,.0f}",
        f"{outcome.batch_rate:,.0f}" if with_job else "",
        f"{findings.goodput(outcome):.0%}" if with_job else "",
    ]


def _mark(met: bool) -> str:
    return "**Met.**" if met else "**Missed.**"
