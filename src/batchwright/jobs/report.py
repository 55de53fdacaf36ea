"""Reports of runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from batchwright.durable_files import replacing
from batchwright.jobs.dry_run import AnswersPlanned, PlannedRequest
from batchwright.jobs.failures import Failure
from batchwright.jobs.loop import Tally
from batchwright.jobs.planned_time import PlannedTime
from batchwright.jobs.prompt_survey import SharedPrompts
from batchwright.jobs.spending import PlannedCost, Spending
from batchwright.pacing.figures import PacerFigures
from batchwright.peak_memory import peak_memory_bytes
from batchwright.planning.field_order import FieldReuse
from batchwright.version import __version__

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

Percentiles = dict[str, float | None]
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_EMPTY: Percentiles = {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The outcome of one `run`, in seconds, milliseconds if the name says so, and bytes.

    Figures of the engine cover only this run, not earlier runs of a resumed job. If the caller passed an engine, they
    count from the start of that engine.
    """

    output: str
    model: str
    inputs: list[str] = field(default_factory=list)
    """The first names of the input."""
    version: str = __version__
    """Version of batchwright."""
    pacing: Mapping[str, PacerFigures] = field(default_factory=dict)
    """With an endpoint elsewhere: what was found out about its limits, and how often it refused requests, by model."""
    implementation: str = ""
    """The implementations of body and attention, the dtype and the device; empty if nothing was computed."""
    total: int
    """Lines of the input, without blank lines."""
    succeeded: int = 0
    """Lines with a response in the output, including those of earlier runs."""
    failed: int = 0
    """Lines with an error in the output, including those of earlier runs."""
    failures: list[Failure] = field(default_factory=list)
    """The failed lines by the code of their error, the most frequent first, with an example of each."""
    first_requests: list[PlannedRequest] = field(default_factory=list)
    """Of a dry run: the first requests that would be computed."""
    spending: Spending | None = None
    """What the job has cost at its endpoint; None if prices are not known."""
    planned_cost: PlannedCost | None = None
    """Of a dry run: what the job would cost; None if prices are not known."""
    planned_answers: AnswersPlanned | None = None
    """Of a dry run: what the job would generate at most."""
    planned_time: PlannedTime | None = None
    """Of a dry run: the seconds that the job would take; None if they are not known."""
    no_planned_time: str = ""
    """Of a dry run: why they are not known; empty if they are, or if nobody expects it, as of an endpoint."""
    reordered_fields: FieldReuse | None = None
    """With `reorder_fields`: the share of the fields' text that rows have in common with earlier ones from the first
    field on, in the order of the template (`before`) and in theirs (`after`)."""
    shared_prompts: SharedPrompts | None = None
    """Of a dry run: what the prompts have in common; None without prefix caching."""
    longest_answer: int = 0
    """Most tokens of the completions of a line of this run, from an endpoint."""
    unreached_limit: int | None = None
    """Least `max_tokens` of the lines of this run, if no answer was cut off by it; None otherwise."""
    resumed: int = 0
    """Lines that earlier runs finished."""
    interrupted: bool = False
    cut_off: int = 0
    """Requests to an endpoint that were given up, mostly as the run ended. Their answers may be charged."""
    wall_seconds: float = 0.0
    """Time of the whole run, including reading the input and loading the model."""
    load_seconds: float = 0.0
    """Time to load the model."""
    rates_seconds: float = 0.0
    """Time to measure the rates of this machine, or to look them up, for the bound; not part of `loop_seconds`."""
    loop_seconds: float = 0.0
    """Time from the first line to the last."""
    bound_seconds: float | None = None
    """Least time this machine needs for what the run computed, see docs/files.md; None if that is not known."""
    share_of_bound: float | None = None
    """Its share of `loop_seconds`: 1 would be as fast as possible."""
    bound: Mapping[str, Any] | None = None
    """Its parts and assumptions, where the time went (`time`), and what each part of it took beyond the bound (`lost`),
    as shares of `loop_seconds`."""
    no_bound: str = ""
    """Why there is no bound; empty if there is one, or if nobody expects it."""
    outside_model_seconds: float = 0.0
    """Part of `loop_seconds` that was not spent in the model: reading, scheduling, writing."""
    prompt_tokens: int = 0
    prompt_tokens_estimated: bool = False
    """Of a dry run: whether some of `prompt_tokens` were not counted, but estimated."""
    generated_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` found in a cache of prompts: an endpoint's, or the engine's prefix cache."""
    cached_share: float = 0.0
    """Their share of `prompt_tokens`."""
    deduplicated: int = 0
    """Lines that got the answer to an identical one; their tokens are in `saved_prompt_tokens` and
    `saved_generated_tokens`, and in none of the other figures."""
    saved_prompt_tokens: int = 0
    saved_generated_tokens: int = 0
    asked_again: int = 0
    """Number of times that a line was sent again because its answer was not JSON."""
    invalid_answers: int = 0
    """Answers of this run that were still not JSON then: their `finish_reason` is `"invalid_json"`."""
    cut_answers: int = 0
    """Answers of this run that were ended by their limit of tokens: their `finish_reason` is `"length"`."""
    generated_tokens_per_second: float = 0.0
    """Rate over `loop_seconds`."""
    prefill_seconds: float = 0.0
    """Time of the model for prompts."""
    decode_seconds: float = 0.0
    """Time of the model for single tokens."""
    prefill_tokens_per_second: float = 0.0
    """Rate over the time of the model for prompts."""
    decode_tokens_per_second: float = 0.0
    """Rate over the time of the model for single tokens."""
    ttft_ms: Percentiles = field(default_factory=_EMPTY.copy)
    """Time to the first token, from when the line was started."""
    tpot_ms: Percentiles = field(default_factory=_EMPTY.copy)
    """Time for each token after the first."""
    steps: int = 0
    occupancy_mean: float = 0.0
    """Mean number of sequences in a step."""
    occupancy_peak: int = 0
    max_num_seqs: int = 0
    padding_efficiency: float = 1.0
    """Ratio of useful rows to computed rows; 1 means no padding."""
    drafted_tokens: int = 0
    """Drafted tokens that were computed along with decodes."""
    accepted_tokens: int = 0
    """Drafted tokens that were right: each saved its sequence a step."""
    forced_tokens: int = 0
    """Generated tokens that the form of an answer left no choice about."""
    kv_blocks: int = 0
    kv_blocks_peak: int = 0
    prefix_hit_rate: float = 0.0
    """Share of the prompt tokens found in the prefix cache."""
    preemptions: int = 0
    peak_memory_bytes: int = 0
    """Peak resident memory of the process and of each replica's; memory that they share counts in each."""
    peak_gpu_bytes: int | None = None
    series: dict[str, list[float | None]] = field(default_factory=dict)
    """Figures of this run over time, the fields of `RunPoint` by name, at most a few hundred values of each."""
    lengths: dict[str, Any] = field(default_factory=dict)
    """Lengths of the answers of this run in tokens: how many ended by themselves (`ended`) and by their limit (`cut`)
    in each `width` of a histogram, their `mean`, and for a sample of lines the expected and the actual one
    (`pairs`)."""
    batches: dict[str, Any] | None = None
    """Of lines that a provider computed in its batches: the fields of `BatchAccount`. None for other runs."""

    @classmethod
    def of_run(
        cls, tally: Tally, stats: EngineStats, *, loop_seconds: float, model_seconds: float, **rest: Any
    ) -> RunReport:
        """The report of a run, with the fields that `stats` has by the same name; `rest` are further fields."""
        values = {each.name: getattr(stats, each.name) for each in fields(cls) if hasattr(stats, each.name)}
        values |= {
            "loop_seconds": loop_seconds,
            "outside_model_seconds": max(0.0, loop_seconds - model_seconds),
            "prompt_tokens": tally.prompt_tokens,
            "generated_tokens": tally.generated_tokens,
            "cached_tokens": tally.cached_tokens,
            "cached_share": tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else 0.0,
            "deduplicated": tally.deduplicated,
            "saved_prompt_tokens": tally.saved_prompt_tokens,
            "saved_generated_tokens": tally.saved_generated_tokens,
            "asked_again": tally.asked_again,
            "invalid_answers": tally.invalid_answers,
            "cut_answers": sum(tally.answers.cut[1:]),  # a prompt that is only scored has an answer of no tokens
            "generated_tokens_per_second": tally.generated_tokens / loop_seconds if loop_seconds > 0 else 0.0,
            "ttft_ms": stats.ttft_ms.summary(),
            "tpot_ms": stats.tpot_ms.summary(),
            "peak_memory_bytes": peak_memory_bytes() + stats.peak_memory_bytes,
            "peak_gpu_bytes": _peak_gpu_memory(),
        }
        return cls(**{**values, **rest})

    @property
    def done(self) -> int:
        """Number of lines in the output."""
        return self.succeeded + self.failed

    def to_dict(self) -> dict[str, Any]:
        """JSON values by name."""
        return {"done": self.done, **asdict(self)}

    def to_json(self) -> bytes:
        """The report as JSON, one figure per line; long data for programs is on lines of its own.

        Anything that has no UTF-8 form, such as the bytes of a file's name, becomes U+FFFD.
        """
        values = _without_surrogates(self.to_dict())
        long = {name: values.pop(name) for name in ("series", "lengths")}
        text = msgspec.json.format(msgspec.json.encode(values), indent=2).removesuffix(b"\n}")
        for name, value in long.items():
            parts = b",\n".join(b"    %b: %b" % (_json(each), _json(content)) for each, content in value.items())
            text += b",\n  %b: {%b}" % (_json(name), b"\n" + parts + b"\n  " if parts else b"")
        return text + b"\n}\n"

    def save(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all; `-` is standard output. Raises OSError."""
        try:
            with nullcontext(sys.stdout.buffer) if str(path) == "-" else replacing(path) as file:
                file.write(self.to_json())
                file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _without_surrogates(value: Any) -> Any:
    """Return a JSON value with U+FFFD for each surrogate in its texts."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_without_surrogates(name): _without_surrogates(each) for name, each in value.items()}
    return [*map(_without_surrogates, value)] if isinstance(value, (list, tuple)) else value


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _peak_gpu_memory() -> int | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.max_memory_allocated())
