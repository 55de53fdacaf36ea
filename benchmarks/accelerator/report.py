"""The table: every figure with its reference, its bar, and whether that is met."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from batchwright.engine_config import QuantizationName
from benchmarks.accelerator.bounds import decode_bound, job_bound
from benchmarks.accelerator.results import (
    Bandwidth,
    Busy,
    Decode,
    Host,
    Mixed,
    Prefix,
    Products,
    Result,
    Section,
    Suite,
    Unavailable,
)
from benchmarks.accelerator.shapes import ModelCost, Shape
from benchmarks.throughput.report import table

HEAD = ("what", "measured", "against", "ratio", "bar", "met")
_NOT_YET = "its turn did not come"
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `met` is None if there is no bar, or if `reason` says why it is not known."""

    what: str
    measured: str = ""
    against: str = ""
    ratio: str = ""
    bar: str = ""
    met: bool | None = None
    reason: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = {True: "yes", False: "no", None: f"? {self.reason}" if self.reason else ""}[self.met]
        return self.what, self.measured, self.against, self.ratio, self.bar, verdict


@dataclass(slots=True)
class Findings:
    """What was measured so far. `failures`: why sections gave less than they should."""

    shape: Shape
    results: list[Result] = field(default_factory=list)
    failures: dict[Section, str] = field(default_factory=dict)

    def all(self, kind: type[_R]) -> list[_R]:
        return [result for result in self.results if isinstance(result, kind)]

    def one(self, kind: type[_R]) -> _R | None:
        return next(iter(self.all(kind)), None)

    def missing(self, section: Section, what: str = "") -> str:
        """Why a row of `section` has no figure."""
        for each in self.all(Unavailable):
            if each.what == what:
                return each.reason
        return self.failures.get(section, _NOT_YET)


def rows(findings: Findings) -> list[Row]:
    """All rows, including those of missing figures."""
    return [
        *_hardware(findings),
        *_decodes(findings),
        *_busy(findings),
        *_fp8(findings),
        *_mixed(findings),
        _prefix(findings),
        _tests(findings),
    ]


def results_table(findings: Findings) -> str:
    return table(HEAD, [row.cells for row in rows(findings)])


def page(findings: Findings) -> str:
    """The whole report as a Markdown document."""
    host = findings.one(Host)
    where = f"{host.device}; {host.software}" if host is not None else "the device was not reached"
    parts = [
        "# The engine on one GPU",
        f"Printed by `benchmarks/gpu.py` on {dt.datetime.now(dt.UTC).date().isoformat()}. Random weights in the shape"
        f" of {findings.shape.name}, bfloat16, greedy, end of text ignored. {where}. What the rows mean and how to"
        " repeat it: [benchmarks/README.md](../README.md).",
        results_table(findings),
        *notes(findings),
    ]
    return "\n\n".join(parts) + "\n"


def notes(findings: Findings) -> list[str]:
    """Lists below the table: how the systems ran, which tests failed."""
    lists = []
    if mixed := findings.all(Mixed):
        lists.append("\n".join(f"- {each.system}: {each.settings}" for each in mixed))
    tests = findings.one(Suite)
    if tests is not None and tests.failed:
        lists.append("Tests that failed:\n\n" + "\n".join(f"- `{name}`" for name in tests.failed))
    return lists


def _hardware(findings: Findings) -> Iterator[Row]:
    bandwidth, cost = findings.one(Bandwidth), ModelCost.of(findings.shape.config)
    if bandwidth is None:
        yield Row("copy, read and written", reason=findings.missing("hardware"))
    else:
        yield Row("copy, read and written", f"{bandwidth.bytes_per_second / 1e9:,.0f} GB/s")
    measured = {each.rows: each for each in findings.all(Products)}
    for count in findings.shape.product_rows:
        what = f"products, {count:,} rows"
        if count not in measured:
            yield Row(what, reason=findings.missing("hardware"))
            continue
        seconds = measured[count].layers + measured[count].head
        rate = count * (cost.layer_flops + cost.head_flops) / seconds
        yield Row(what, f"{_ms(seconds)}, {rate / 1e12:,.1f} TFLOP/s")


def _decodes(findings: Findings) -> Iterator[Row]:
    bandwidth, cost = findings.one(Bandwidth), ModelCost.of(findings.shape.config)
    measured = _decoded(findings, None)
    for count in findings.shape.decodes:
        what, bar = f"decode, {count} of {findings.shape.context:,}", "≥ 85%"
        found = measured.get(count)
        if found is None:
            yield Row(what, bar=bar, reason=findings.missing("decode"))
        elif bandwidth is None:
            yield Row(what, f"{_ms(found.step)} a step", bar=bar, reason=findings.missing("hardware"))
        else:
            bound = decode_bound(cost, bandwidth.bytes_per_second, count, found.context)
            share = bound / found.step
            yield Row(what, f"{_ms(found.step)} a step", f"bound {_ms(bound)}", f"{share:.0%}", bar, share >= 0.85)


def _decoded(findings: Findings, quantization: QuantizationName | None) -> dict[int, Decode]:
    """Steady decoding with weights of one kind, by the number of sequences."""
    return {each.sequences: each for each in findings.all(Decode) if each.quantization == quantization}


def _fp8(findings: Findings) -> Iterator[Row]:
    plain, rounded = _decoded(findings, None), _decoded(findings, "fp8")
    for count in findings.shape.decodes:
        what = f"decode in fp8, {count} of {findings.shape.context:,}"
        if count not in rounded:
            yield Row(what, reason=findings.missing("fp8", "decode in fp8"))
        elif count not in plain:
            yield Row(what, f"{_ms(rounded[count].step)} a step", reason=findings.missing("decode"))
        else:
            ours, without = rounded[count].step, plain[count].step
            yield Row(what, f"{_ms(ours)} a step", f"bfloat16 {_ms(without)}", f"{without / ours:.2f}")


def _busy(findings: Findings) -> Iterator[Row]:
    steps = {count: each.step for count, each in _decoded(findings, None).items()}
    measured = {each.sequences: each for each in findings.all(Busy)}
    for count in findings.shape.decodes:
        what, bar = f"GPU busy, {count}", "≥ 95%"
        found = measured.get(count)
        if found is None:
            yield Row(what, bar=bar, reason=findings.missing("decode", what))
        else:
            share = found.kernels / steps[count]
            measures = f"{_ms(found.kernels)} of kernels", f"step {_ms(steps[count])}"
            yield Row(what, *measures, f"{share:.0%}", bar, share >= 0.95)


def _mixed(findings: Findings) -> Iterator[Row]:
    systems = {each.system: each for each in findings.all(Mixed)}
    ours, theirs = systems.get("batchwright"), systems.get("transformers")
    yield _mixed_bound(findings, ours)
    yield _mixed_peer(findings, ours, theirs)


def _mixed_bound(findings: Findings, ours: Mixed | None) -> Row:
    what, bar = f"{findings.shape.mixed} mixed, of the bound", "≥ 80%"
    bandwidth, products = findings.one(Bandwidth), findings.all(Products)
    if ours is None:
        return Row(what, bar=bar, reason=findings.missing("mixed"))
    lengths = findings.shape.lengths().lengths
    if bandwidth is None or len(products) < len(findings.shape.product_rows):
        return Row(what, _time(ours), bar=bar, reason=findings.missing("hardware"))
    cost = ModelCost.of(findings.shape.config)
    bound = job_bound(cost, bandwidth.bytes_per_second, products, lengths)
    share = bound / ours.seconds
    measures = _job(findings, ours), f"bound {bound:,.2f} s"
    if ours.ended:
        return Row(what, *measures, f"{share:.0%}", bar, share >= 0.80)
    return Row(what, *measures, f"< {share:.0%}", bar, *_undecided(share < 0.80, decided=False))


def _mixed_peer(findings: Findings, ours: Mixed | None, theirs: Mixed | None) -> Row:
    what, bar = f"{findings.shape.mixed} mixed, over generate_batch", "≥ 2.00"
    if ours is None or theirs is None:
        reason = findings.missing("mixed" if ours is None else "generate_batch")
        return Row(what, _job(findings, ours), _job(findings, theirs), bar=bar, reason=reason)
    ratio = theirs.seconds / ours.seconds
    measures = _job(findings, ours), _job(findings, theirs)
    if ours.ended and theirs.ended:
        return Row(what, *measures, f"{ratio:.2f}", bar, ratio >= 2.0)
    if ours.ended:  # theirs would have taken longer
        return Row(what, *measures, f"> {ratio:.2f}", bar, *_undecided(ratio >= 2.0, decided=True))
    if theirs.ended:
        return Row(what, *measures, f"< {ratio:.2f}", bar, *_undecided(ratio < 2.0, decided=False))
    return Row(what, *measures, bar=bar, reason="neither had ended")


def _undecided(certain: bool, *, decided: bool) -> tuple[bool | None, str]:
    """Whether a bar is met when one system was stopped: `decided` if that is certain, and otherwise why not."""
    return (decided, "") if certain else (None, "one had not ended")


def _prefix(findings: Findings) -> Row:
    shape = findings.shape
    what, bar = f"{shape.sharing} behind {shape.prefix:,}, to without", "≤ 1.20"
    steps = {each.prefix: each.step for each in findings.all(Prefix)}
    without, behind = steps.get(0), steps.get(shape.prefix)
    if without is None or behind is None:
        return Row(what, bar=bar, reason=findings.missing("prefix"))
    ratio = behind / without
    return Row(what, f"{_ms(behind)} a step", f"without {_ms(without)}", f"{ratio:.2f}", bar, ratio <= 1.2)


def _tests(findings: Findings) -> Row:
    tests, bar = findings.one(Suite), "all pass"
    if tests is None:
        return Row("tests/engine", bar=bar, reason=findings.missing("tests", "tests/engine"))
    measured = f"{tests.passed} passed, {len(tests.failed)} failed, {tests.skipped} skipped"
    if tests.failed or tests.ended:
        return Row("tests/engine", measured, bar=bar, met=not tests.failed)
    return Row("tests/engine", measured, bar=bar, reason="time was over before the last")


def _job(findings: Findings, run: Mixed | None) -> str:
    if run is None:
        return ""
    generated = findings.shape.lengths().generated
    return f"{_time(run)}, {generated / run.seconds:,.0f} tokens/s" if run.ended else _time(run)


def _time(run: Mixed) -> str:
    return f"{run.seconds:,.2f} s" if run.ended else f"stopped after {run.seconds:,.0f} s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"
