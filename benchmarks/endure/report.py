"""The table, the bars and the page."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from batchwright.models import DEFAULT_MODEL
from benchmarks.endure.clients import OUTPUT, Kind
from benchmarks.endure.run import Endured
from benchmarks.endure.watch import Sample, slope_per_hour
from benchmarks.throughput.report import machine, table

HEALTH_MS = 100.0
"""Bound on the p99 of `/health`."""
GROWTH = 0.03
"""Bound on how much more memory is held in the last tenth of the window than in the first."""
_SHOWN = 5
_LEFT_ALONE = 0.02
"""Share of a core: if the host of the machine took no more than that in an interval, any slowness is the service's."""

_INTRODUCTION = """\
{clients} online clients beside a batch of {lines:,} lines for {seconds:.0f} s; printed by \
`benchmarks/endurance.py` on {date}. {model}, {processor}, {cores} cores, Python {python}.

Each client is a closed loop: it asks for a chat answer of at most {least} to {most} tokens, reads it whole, and \
pauses for a random (exponential) time of {thinking:.1f} s on average before it asks again. Every other one reads a \
stream. Without pauses all of them together got {capacity:.1f} answers/s; the pauses are such that they ask at most \
{share:.0%} of that. The window began {ramp:.0f} s after the clients and the batch did. {placed}. In the window the \
event loop took {loop:.0%} of a core, all threads of the service {service:.0%}, the load generator {generator:.0%}."""


@dataclass(frozen=True)
class Memory:
    """MiB that the service held in the window."""

    start: float
    """Mean of its first tenth."""
    peak: float
    end: float
    """Mean of its last tenth."""
    slope: float
    """MiB an hour, by least squares."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Memory:
        """Raises `ValueError` if there are too few samples."""
        slope = slope_per_hour(samples, lambda sample: sample.rss)
        if slope is None:
            raise ValueError("memory was looked at less than twice: measure for longer")
        tenth = max(1, len(samples) // 10)
        values = [sample.rss for sample in samples]
        return cls(fmean(values[:tenth]), max(values), fmean(values[-tenth:]), slope)

    @property
    def growth(self) -> float:
        """From its start to its end, as a share of the start."""
        return self.end / self.start - 1


def page(found: Endured) -> str:
    """The whole report as a Markdown document."""
    parts = ["# Online clients beside a batch, for long", introduction(found), figures_table(found), bars(found)]
    return "\n\n".join(parts) + "\n"


def introduction(found: Endured) -> str:
    """What was run, where, and who had which core."""
    host, setting = machine(), found.setting
    return _INTRODUCTION.format(
        clients=setting.clients,
        lines=setting.lines,
        seconds=setting.seconds,
        date=host["date"],
        model=DEFAULT_MODEL,
        processor=host["processor"],
        cores=len(found.cores.engine | found.cores.http | found.cores.generator),
        python=host["python"],
        least=OUTPUT[0],
        most=OUTPUT[1],
        thinking=found.thinking,
        capacity=found.capacity,
        share=setting.share,
        ramp=setting.ramp,
        placed=found.cores.in_words(),
        loop=found.loop_share,
        service=found.service_share,
        generator=found.generator_share,
    )


def figures_table(found: Endured) -> str:
    """Everything that was measured in the window."""
    memory, batch = Memory.of(found.samples), found.batch
    health = health_ms(found)
    descriptors = [sample.descriptors for sample in found.samples]
    threads = [sample.threads for sample in found.samples]
    rows = [
        ["online answers", f"{sum(each.error is None for each in found.replies):,}"],
        ["online answers/s", f"{len(found.replies) / found.setting.seconds:.1f}"],
        ["whole plain answer, p50 / p99, s", _quantiles(_seconds(found, "plain"))],
        ["first text of a stream, p50 / p99, s", _quantiles(_seconds(found, "stream"))],
        ["errors", str(len(found.errors))],
        ["lines of the batch in the window", f"{found.batch_lines:,}"],
        ["batches ended / lines answered / failed", f"{batch.ended} / {batch.lines:,} / {batch.failed:,}"],
        ["/health, p50 / p99 / slowest, ms", f"{_quantiles(health)} / {max(health, default=0.0):.0f}"],
        ["requests for /health", f"{len(found.probed):,}"],
        ["taken by the host of this machine, of a core", f"{_stolen(found):.0%}"],
        ["/health in the seconds without that, p50 / p99, ms", _quantiles(left_alone := left_alone_ms(found))],
        ["requests for /health in these", f"{len(left_alone):,}"],
        ["memory at start / peak / end, MiB", f"{memory.start:.0f} / {memory.peak:.0f} / {memory.end:.0f}"],
        ["slope of memory, MiB an hour", f"{memory.slope:+.1f}"],
        ["descriptors, least / most", f"{min(descriptors)} / {max(descriptors)}"],
        ["threads, least / most", f"{min(threads)} / {max(threads)}"],
    ]
    return table(["", "figure"], rows)


def bars(found: Endured) -> str:
    """What is compared with what."""
    memory, errors = Memory.of(found.samples), Counter(found.errors)
    health = health_ms(found)
    p99 = float(np.percentile(health, 99)) if health else float("inf")
    shown = "; ".join(f"{count} times {error}" for error, count in errors.most_common(_SHOWN))
    whole = not errors and not found.batch.failed and len(health) == len(found.probed)
    unanswered = len(found.probed) - len(health)
    return "\n".join(
        [
            f"- {_mark(whole)} No error: {len(found.errors)} online{f' ({shown})' if shown else ''},"
            f" {found.batch.failed} lines, {unanswered} of /health.",
            f"- {_mark(memory.growth <= GROWTH)} Memory is flat, at most {GROWTH:.0%} more at the end:"
            f" {memory.growth:+.1%}.",
            f"- {_mark(p99 <= HEALTH_MS)} p99 of /health is at most {HEALTH_MS:.0f} ms: {p99:.0f} ms.",
        ]
    )


def health_ms(found: Endured) -> list[float]:
    """Milliseconds of the requests that were answered."""
    return [each.seconds * 1e3 for each in found.probed if each.answered]


def left_alone_ms(found: Endured) -> list[float]:
    """Milliseconds of the requests that were answered while the host of this machine took next to nothing."""
    times = [at for at, _ in found.stolen]
    found_ms = []
    for each in found.probed:
        first, last = bisect(times, each.at) - 1, bisect(times, each.at + each.seconds)
        if not each.answered or first < 0 or last == len(times):
            continue
        (earlier, before), (later, after) = found.stolen[first], found.stolen[last]
        if after - before <= _LEFT_ALONE * (later - earlier):
            found_ms.append(each.seconds * 1e3)
    return found_ms


def _stolen(found: Endured) -> float:
    """Share of a core that the host took in the window."""
    (earlier, before), (later, after) = found.stolen[0], found.stolen[-1]
    return (after - before) / (later - earlier)


def _seconds(found: Endured, kind: Kind) -> list[float]:
    """Seconds to the first text, which for a plain answer is its end."""
    return [each.first - each.began for each in found.replies if each.kind == kind and each.error is None]


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return "none"
    digits = 0 if max(values) >= 100 else 2
    return " / ".join(f"{float(np.percentile(values, q)):.{digits}f}" for q in (50, 99))


def _mark(met: bool) -> str:
    return "**Met.**" if met else "**Missed.**"
