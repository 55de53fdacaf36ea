"""The report of a soak, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from benchmarks.endure.watch import Sample, lives
from benchmarks.throughput.report import machine, table
from tests.soak.checks import blamed, calm_health, checks, growth, percentile, unexplained
from tests.soak.online import Asked
from tests.soak.soak import Seen
from tests.soak.timeline import ANSWERED, Era


def page(reports: Sequence[str]) -> str:
    """The reports of several soaks as one document."""
    host = machine()
    head = (
        f"Printed by `python -m tests.soak` on {host['date']}. {host['processor']}, {host['cores']} cores, which the "
        "service shares with its clients. What is done and what must hold: "
        "[reliability.md](../../docs/reliability.md#how-it-is-shown)."
    )
    return "\n".join(["# A soak of the service\n", head + "\n", *reports])


def report(seen: Seen) -> str:
    """Figures for each fault and in all, and whether each check is met."""
    plan = seen.plan
    head = (
        f"## {plan.backend}, {plan.database}\n\n"
        f"Seed {plan.seed}, {len(seen.timeline.eras)} faults, one every {plan.period:.0f} s. {plan.clients} online "
        f"clients, {plan.customers} customers of each of {plan.tenants} "
        f"tenants, {plan.watchers} watchers of the dashboard."
    )
    marks = {True: "**Met.**", False: "**Missed.**", None: "**Not judged.**"}
    stated = "\n".join(f"- {marks[check.met]} {check.name}: {check.figure}." for check in checks(seen))
    parts = [head, _faults(seen), _kinds(seen), _totals(seen), stated]
    parts += [f"```text\n{each.rstrip()}\n```" for each in seen.log.tracebacks]
    return "\n\n".join(parts) + "\n"


def _faults(seen: Seen) -> str:
    names = list(dict.fromkeys(era.name for era in seen.timeline.eras))
    asked = [(era.name, each) for each in seen.asked if (era := blamed(seen, each)) is not None]
    rows = [_fault_row(seen, name, [each for blame, each in asked if blame == name]) for name in names]
    head = ["fault", "times", "seconds", "online answered", "failed", "answers again after, s", "slowest /health, ms"]
    return table(head, rows)


def _fault_row(seen: Seen, name: str, asked: list[Asked]) -> list[str]:
    eras = [era for era in seen.timeline.eras if era.name == name]
    failed = Counter(each.outcome for each in asked if each.outcome != ANSWERED)
    health = [
        each.seconds
        for each in seen.probed
        if each.answered and any(era.name == name for era in seen.timeline.during(each.at, each.at))
    ]
    return [
        name,
        str(len(eras)),
        f"{sum(era.ended - era.began for era in eras) / len(eras):.1f}",
        str(len(asked) - failed.total()),
        ", ".join(f"{count} {outcome}" for outcome, count in failed.most_common()) or "none",
        f"{max(_recovery(seen, era) for era in eras):.1f}",
        f"{max(health, default=0.0) * 1e3:.0f}",
    ]


def _recovery(seen: Seen, era: Era) -> float:
    """Seconds from the end of a fault to the next answer."""
    later = (each.ended - era.ended for each in seen.asked if each.outcome == ANSWERED and each.ended >= era.ended)
    return min(later, default=float("inf"))


def _kinds(seen: Seen) -> str:
    rows = []
    for kind in sorted({each.kind for each in seen.asked if each.kind != "watcher"}):
        asked = [each for each in seen.asked if each.kind == kind]
        times = sorted(
            each.ended - each.began
            for each in asked
            if each.outcome == ANSWERED and seen.timeline.calm(each.began, each.ended)
        )
        failed = sum(each.outcome != ANSWERED for each in asked)
        shown = [f"{percentile(times, share) * 1e3:.0f}" for share in (0.5, 0.99)] if times else ["", ""]
        rows.append([kind, str(len(asked) - failed), str(failed), *shown])
    return table(["online requests", "answered", "failed", "p50 outside of faults, ms", "p99"], rows)


def _totals(seen: Seen) -> str:
    jobs = [job for load in seen.loads for job in load.jobs]
    statuses = Counter(job.record.get("status", "unknown") for job in jobs)
    ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    health = calm_health(seen)
    errors = ", ".join(f"{count} {event}" for event, count in seen.log.errors.most_common())
    rows = [
        ["batches", f"{len(jobs)}: {ended}"],
        ["lines", f"{sum(len(job.questions) for job in jobs):,}"],
        ["batches whose results were read while they came", str(sum(job.results is not None for job in jobs))],
        ["batches whose output was checked and deleted", str(sum(job.cleared for job in jobs))],
        ["calls of the scripted model", f"{seen.calls:,}" if seen.calls else "none"],
        ["webhook messages", f"{seen.messages}, {seen.repeated_messages} repeated"],
        ["online requests", f"{len(seen.asked):,}, {len(unexplained(seen))} failed without a reason"],
        ["/health outside of faults, ms", _health(health)],
        ["memory, MiB", _memory(seen.samples)],
        ["growth outside of faults, an hour", str(growth(seen) or "too short to tell")],
        ["log", f"{seen.log.size / 2**20:.1f} MiB, {seen.log.lines:,} lines, {seen.log.requests:,} of requests"],
        ["errors in the log", errors or "none"],
    ]
    return table(["in all", ""], rows)


def _health(times: list[float]) -> str:
    if not times:
        return "none"
    shown = [f"{name} {percentile(times, share) * 1e3:.0f}" for name, share in (("p50", 0.5), ("p99", 0.99))]
    return f"{', '.join(shown)}, slowest {times[-1] * 1e3:.0f}, of {len(times)}"


def _memory(samples: list[Sample]) -> str:
    if not samples:
        return "none"
    first, *_ = lives(samples)
    peak = max(each.rss for each in samples)
    return f"start {first[0].rss:.0f}, peak {peak:.0f}, end {samples[-1].rss:.0f}; {len(lives(samples))} processes"
