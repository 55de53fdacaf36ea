"""Reports of runs as the page reads them: every field may be missing, as in those of other versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchwright.errors import InputError
from batchwright.jobs.run_series import COLUMNS

_NO_REPORT = "is no report of a run: `batchwright run … --report FILE` writes one"


class Latencies(msgspec.Struct):
    """Milliseconds."""

    p50: float | None = None
    p99: float | None = None


class FailedLines(msgspec.Struct):
    """The lines that failed with one code."""

    code: str = ""
    count: int = 0
    line: int = 0
    message: str = ""


class Money(msgspec.Struct):
    """What a job has cost, in dollars."""

    cost: float | None = None
    cost_of_all_runs: float | None = None
    budget: float | None = None
    saved_by_caching: float | None = None
    saved_by_batching: float | None = None


class Limits(msgspec.Struct):
    """What was found of the limits of an endpoint."""

    sent: int = 0
    refused: int = 0


class Lengths(msgspec.Struct):
    """Lengths of answers, see `lengths_of`."""

    width: int = 1
    ended: list[int] = []
    cut: list[int] = []
    mean: float | None = None
    pairs: list[tuple[float, float]] = []


class Shares(msgspec.Struct):
    """Shares of the time of a run by what it was spent on."""

    time: dict[str, float] = {}
    """Of the whole time."""
    lost: dict[str, float] = {}
    """Of the time beyond the bound."""


class Report(msgspec.Struct):
    """The fields of a `RunReport` that the page shows; None or empty where a report lacks them."""

    total: int
    output: str
    model: str = ""
    inputs: list[str] = []
    version: str | None = None
    implementation: str = ""
    succeeded: int = 0
    failed: int = 0
    resumed: int = 0
    deduplicated: int = 0
    interrupted: bool = False
    cut_answers: int = 0
    invalid_answers: int = 0
    wall_seconds: float | None = None
    load_seconds: float | None = None
    rates_seconds: float | None = None
    loop_seconds: float | None = None
    outside_model_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_share: float | None = None
    generated_tokens_per_second: float | None = None
    ttft_ms: Latencies = msgspec.field(default_factory=Latencies)
    tpot_ms: Latencies = msgspec.field(default_factory=Latencies)
    steps: int = 0
    occupancy_mean: float | None = None
    occupancy_peak: int | None = None
    max_num_seqs: int | None = None
    padding_efficiency: float | None = None
    kv_blocks: int | None = None
    kv_blocks_peak: int | None = None
    preemptions: int | None = None
    peak_memory_bytes: int | None = None
    spending: Money | None = None
    pacing: dict[str, Limits] = {}
    failures: list[FailedLines] = []
    bound_seconds: float | None = None
    share_of_bound: float | None = None
    bound: Shares | None = None
    no_bound: str = ""
    series: dict[str, list[float | None]] = {}
    lengths: Lengths = msgspec.field(default_factory=Lengths)

    @property
    def done(self) -> int:
        """Number of lines in the output."""
        return self.succeeded + self.failed

    @property
    def has_engine(self) -> bool:
        """Whether an engine on this machine computed."""
        return self.steps > 0


def report_of(values: Any, name: str) -> Report:
    """Return a report from its JSON value. Raises `InputError`, which names it."""
    if not isinstance(values, Mapping) or not {"total", "output"} <= values.keys():
        raise InputError(f"{name} {_NO_REPORT}")
    if values.get("planned_answers") is not None:
        raise InputError(f"{name} is of a plan, which ran nothing: name a report that `run … --report FILE` wrote")
    try:
        report = msgspec.convert(values, Report)
    except msgspec.ValidationError as error:
        raise InputError(f"{name} {_NO_REPORT} ({error})") from None
    report.series = _columns(report.series, name)
    return report


def read_report(path: Path) -> Report:
    """Read a report. Raises `InputError`, which names the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: name a report that `batchwright run … --report FILE` wrote") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        values = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    return report_of(values, str(path))


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each file, such that no two are equal."""
    stems = [path.name.removesuffix(".json") for path in paths]
    for index, path in enumerate(paths):
        if [each.name for each in paths].count(path.name) > 1:
            stems[index] = f"{path.absolute().parent.name}/{stems[index]}"
    # A name that is not UTF-8 cannot be written into a page.
    stems = [stem.encode(errors="surrogateescape").decode(errors="replace") for stem in stems]
    return [
        stem if stems.count(stem) == 1 else f"{stem} ({stems[:index].count(stem) + 1})"
        for index, stem in enumerate(stems)
    ]


def _columns(series: Mapping[str, list[float | None]], name: str) -> dict[str, list[float | None]]:
    known = {column: values for column, values in series.items() if column in COLUMNS}
    if len({len(values) for values in known.values()}) > 1 or None in known.get("seconds", ()):
        raise InputError(f"{name}: its series differ in length, or lack times; write the report again")
    return known if known.get("seconds") else {}
