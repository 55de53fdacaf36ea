"""What must hold of a soak."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.endure.watch import seconds_watched, slope_per_hour, warm
from tests.soak.online import Asked
from tests.soak.soak import Seen, grown
from tests.soak.timeline import Era

_MOST_MEMORY, _MOST_DESCRIPTORS, _MOST_THREADS = 64.0, 120.0, 30.0
"""Growth in an hour, of memory in MiB. The bounds on the others leave room for noise: they vary with the load."""
_WARM_UP = 4.0
"""Periods until a new process holds what its load needs."""
_ENOUGH = 600.0
"""Seconds below which a slope says nothing."""
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
        Check(
            f"In an hour memory grows by at most {_MOST_MEMORY:.0f} MiB, descriptors by {_MOST_DESCRIPTORS:.0f},"
            f" threads by {_MOST_THREADS:.0f}",
            *_flat(seen),
        ),
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


@dataclass(frozen=True)
class Growth:
    """In an hour."""

    memory: float
    """MiB."""
    descriptors: float
    threads: float

    def __str__(self) -> str:
        return f"{self.memory:+.0f} MiB, {self.descriptors:+.0f} descriptors, {self.threads:+.0f} threads"


def growth(seen: Seen) -> Growth | None:
    """In the calm between faults, within the life of each process, when it is warm; None for too little of that."""
    samples = [each for each in warm(seen.samples, _WARM_UP * seen.plan.period) if seen.timeline.calm(each.at, each.at)]
    memory = slope_per_hour(samples, lambda sample: sample.rss)
    descriptors = slope_per_hour(samples, lambda sample: sample.descriptors)
    threads = slope_per_hour(samples, lambda sample: sample.threads)
    if memory is None or descriptors is None or threads is None or seconds_watched(samples) < _ENOUGH:
        return None
    return Growth(memory, descriptors, threads)


def _flat(seen: Seen) -> tuple[bool | None, str]:
    found = growth(seen)
    if found is None:
        return None, f"{_ENOUGH:.0f} s of warm processes are needed to tell"
    flat = found.memory <= _MOST_MEMORY and found.descriptors <= _MOST_DESCRIPTORS and found.threads <= _MOST_THREADS
    return flat, str(found)


def _at_rest(seen: Seen) -> tuple[bool, str]:
    first, last = seen.first_rest, seen.last_rest
    if first is None or last is None:
        return False, "it was not seen at rest"
    figure = (
        f"descriptors {first.descriptors} before, {last.descriptors} after; threads {first.threads}, {last.threads}"
    )
    held = ", ".join(f"{name} {value:g}" for name, value in seen.held.items())
    return not grown(seen) and not held, f"{figure}; in progress: {held or 'nothing'}"


def _log_size(seen: Seen) -> tuple[bool, str]:
    most = _LOG_REQUEST * seen.requests + _LOG_FAULT * (1 + len(seen.timeline.eras))
    bounded = seen.log.size <= most and seen.log.busiest <= _BUSIEST
    return (
        bounded,
        f"{seen.log.size / 2**20:.1f} MiB for {seen.requests:,} requests; {seen.log.busiest} lines a second at most",
    )


def _tracebacks(seen: Seen) -> tuple[bool, str]:
    return not seen.log.traceback_count, f"{seen.log.traceback_count} tracebacks"
