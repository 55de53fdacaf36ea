"""What must hold of a soak."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.endure.watch import Sample, seconds_watched, slope_per_hour, warm
from tests.soak.online import Asked
from tests.soak.soak import Seen, grown
from tests.soak.timeline import Era

_MOST_GROWTH = 64.0
"""MiB an hour."""
ENOUGH = 900.0
"""Seconds of calm below which a slope says nothing."""
_MOST_HEALTH = 0.5
"""Seconds; the service shares its cores with its clients here."""
_LOG_REQUEST, _LOG_FAULT = 1024, 256 * 1024
"""Bytes of log, for each request and for each fault."""
_BUSIEST = 1000
"""Lines of log in a second that are not of requests."""
_SHOWN = 5


@dataclass(frozen=True)
class Check:
    """One statement."""

    name: str
    met: bool | None
    """None: the soak was too short to tell."""
    figure: str


def checks(seen: Seen) -> list[Check]:
    """All of them, in the order of the report."""
    return [
        Check("Every batch ended right, each line once; every start and end went well", *_ended(seen)),
        Check("Online requests failed only as the fault of the moment allows", *_explained(seen)),
        Check(f"p99 of /health outside of faults is at most {_MOST_HEALTH * 1e3:.0f} ms", *_health(seen)),
        Check(f"Memory grows by at most {_MOST_GROWTH:.0f} MiB an hour", *_flat(seen)),
        Check("At rest nothing is held for clients that have gone", *_at_rest(seen)),
        Check("The log is bounded by what was asked", *_log_size(seen)),
        Check("No traceback is in the log", *_tracebacks(seen)),
        Check("No temporary file is left", not seen.temporary, f"{len(seen.temporary)} files"),
    ]


def _ended(seen: Seen) -> tuple[bool, str]:
    return seen.failure is None, seen.failure or f"{sum(len(load.jobs) for load in seen.loads)} batches"


def unexplained(seen: Seen) -> list[Asked]:
    """Online requests that failed as they must not."""
    return [each for each in seen.asked if not seen.timeline.explains(each.outcome, each.began, each.ended)]


def blamed(seen: Seen, asked: Asked) -> Era | None:
    """The fault to which a request belongs: one that explains its failure, or the last one at all in its time."""
    eras = seen.timeline.during(asked.began, asked.ended)
    return next((era for era in eras if asked.outcome in era.allowed), eras[-1] if eras else None)


def _explained(seen: Seen) -> tuple[bool, str]:
    wrong = unexplained(seen)
    shown = "; ".join(f"{each.kind}: {each.outcome} {each.detail}".strip() for each in wrong[:_SHOWN])
    return not wrong, f"{len(wrong)} of {len(seen.asked)} unexplained{': ' if wrong else ''}{shown}"


def calm_health(seen: Seen) -> list[float]:
    """Seconds, in order of size, of the requests for `/health` outside of faults; infinite where none was answered."""
    return sorted(
        each.seconds if each.answered else float("inf")
        for each in seen.probed
        if seen.timeline.calm(each.at, each.at + each.seconds)
    )


def _health(seen: Seen) -> tuple[bool, str]:
    times = calm_health(seen)
    if not times:
        return False, "none was asked for"
    p99 = percentile(times, 0.99)
    return p99 <= _MOST_HEALTH, f"{p99 * 1e3:.0f} ms"


def percentile(ordered: list[float], share: float) -> float:
    """The value that so large a share of them does not pass."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def calm_samples(seen: Seen) -> list[Sample]:
    """Those outside of faults, each process having run for a period before."""
    return [each for each in warm(seen.samples, seen.plan.period) if seen.timeline.calm(each.at, each.at)]


def _flat(seen: Seen) -> tuple[bool | None, str]:
    samples = calm_samples(seen)
    slope, seconds = slope_per_hour(samples, lambda sample: sample.rss), seconds_watched(samples)
    if slope is None or seconds < ENOUGH:
        return None, f"{seconds:.0f} s of calm are too few to tell"
    return slope <= _MOST_GROWTH, f"{slope:+.0f} MiB an hour"


def _at_rest(seen: Seen) -> tuple[bool, str]:
    first, last = seen.first_rest, seen.last_rest
    if first is None or last is None:
        return False, "it was not seen at rest"
    figure = (
        f"descriptors {first.descriptors} before, {last.descriptors} after; threads {first.threads}, {last.threads}"
    )
    held = ", ".join(f"{name} {value:g}" for name, value in seen.held.items())
    return not grown(seen) and not held, f"{figure}; in work: {held or 'nothing'}"


def _log_size(seen: Seen) -> tuple[bool, str]:
    most = _LOG_REQUEST * seen.requests + _LOG_FAULT * (1 + len(seen.timeline.eras))
    bounded = seen.log.size <= most and seen.log.busiest <= _BUSIEST
    return (
        bounded,
        f"{seen.log.size / 2**20:.1f} MiB for {seen.requests:,} requests; {seen.log.busiest} lines a second at most",
    )


def _tracebacks(seen: Seen) -> tuple[bool, str]:
    return not seen.log.traceback_count, f"{seen.log.traceback_count} tracebacks"
