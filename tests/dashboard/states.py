"""Made-up states of a service."""

from __future__ import annotations

from typing import Any

from batchwright.limiting.quotas import NAMES
from batchwright.server.dashboard.dashboard_state import (
    ClassState,
    DashboardState,
    EngineState,
    JobCounts,
    JobState,
    LevelState,
    Percentiles,
    QuotaState,
    ServerState,
    SloState,
)
from batchwright.service.observability.activity import Point, TokenRates

NOW = 1_800_000_000.0
MANY = 1_000_000_000
LONG_NAME = "evaluation-of-all-support-tickets-of-the-year-2026-de.jsonl"


def job(number: int = 1, **changes: Any) -> JobState:
    """Return a job that is in progress."""
    fields: dict[str, Any] = {
        "id": f"batch_{number:024x}",
        "kind": "batch",
        "name": f"job-{number}.jsonl",
        "endpoint": "/v1/chat/completions",
        "model": "smollm2-135m",
        "status": "in_progress",
        "paused": False,
        "total": 1000,
        "completed": 250,
        "failed": 0,
        "progress": 0.25,
        "eta_seconds": 75.0,
        "shared": 0.634,
        "cached": 0.61,
        "least_seconds": 125.0,
        "share_of_time": 0.874,
        "lines_per_second": 10.0,
        "input_tokens": 25_000,
        "output_tokens": 12_500,
        "created_at": NOW - 25,
        "expires_at": NOW + 86_400,
        "ended_at": None,
        "input_file_id": f"file-{number:024x}",
        "output_file_id": None,
        "error_file_id": None,
        "problem": None,
    }
    return JobState(**(fields | changes))


def state(*jobs: JobState, **changes: Any) -> DashboardState:
    """Return the state of an idle service with these jobs."""
    fields: dict[str, Any] = {
        "at": NOW,
        "version": "1.2.3",
        "uptime_seconds": 90.0,
        "ready": True,
        "draining": False,
        "keys_required": False,
        "models": ["smollm2-135m"],
        "backend": "engine",
        "tokens": TokenRates(),
        "online": ClassState(),
        "batch": ClassState(),
        "engine": EngineState(
            implementation="fused body, native attention, bfloat16, cpu",
            steps=0,
            occupancy=None,
            max_num_seqs=256,
            kv_used=0.0,
            prefix_hit_rate=0.0,
            padding_efficiency=1.0,
            preemptions=0,
        ),
        "dispatch_reasons": {},
        "lines_pending": 0,
        "lines_claimed": 0,
        "deliveries_pending": 0,
        "deliveries_failed": 0,
        "job_counts": JobCounts(),
        "jobs": list(jobs),
        "history": [],
    }
    return DashboardState(**(fields | changes))


def extreme() -> DashboardState:
    """Return a state with long names, large numbers and every status."""
    times = Percentiles(count=MANY, p50=3_599_000.0, p90=86_399_000.0, p99=863_990_000.0)
    rates = TokenRates(prompt=float(MANY), generated=float(MANY))
    counts = dict.fromkeys(("waiting", "running", "answered", "failed", "cancelled"), MANY)
    traffic = ClassState(**counts, tokens=rates, latency_ms=times, ttft_ms=times, tpot_ms=times)
    ended = {"ended_at": NOW, "output_file_id": "file-1", "error_file_id": "file-2"}
    large: dict[str, Any] = {
        "name": LONG_NAME,
        "model": "organization-with-a-name/model-with-a-rather-long-name-of-its-own-8B",
        "total": MANY,
        "completed": MANY - 1_000_001,
        "failed": 1_000_000,
        "progress": 0.999999999,
        "eta_seconds": 8_639_999.0,
        "lines_per_second": 123_456.7,
    }
    statuses = ("validating", "in_progress", "finalizing", "cancelling", "completed", "expired", "cancelled", "failed")
    jobs = [
        job(number, status=status, **large, **(ended if number > 4 else {}))
        for number, status in enumerate(statuses, start=1)
    ]
    problem = "line 3: " + "unbroken" * 30
    jobs.append(job(20, **(large | {"status": "failed", "problem": problem, "name": "x" * 60})))
    point: dict[str, Any] = {
        "prompt_tokens_per_second": float(MANY),
        "generated_tokens_per_second": 5e8,
        "online": MANY,
        "batch": MANY,
    }
    base = state()
    assert base.engine is not None
    engine = base.engine.model_dump() | {
        "implementation": LONG_NAME * 3,
        "steps": MANY,
        "occupancy": 99_999.5,
        "max_num_seqs": 100_000,
        "preemptions": MANY,
    }
    return state(
        *jobs,
        uptime_seconds=1e9,
        models=[LONG_NAME, LONG_NAME],
        backend="https://" + "a-host-with-a-long-name." * 4 + "example/v1",
        tokens=rates,
        online=traffic,
        batch=traffic,
        engine=EngineState(**engine),
        levels=[
            LevelState(
                priority=priority,
                succeeded=MANY,
                failed=MANY,
                refused=MANY,
                in_time_share=0.12345,
                p50=3_599_000.0,
                p99=863_990_000.0,
            )
            for priority in (-(2**31), 5, 2**31 - 1, "other")
        ],
        slos=[
            SloState(
                name=LONG_NAME,
                goal=0.99999,
                attained=0.12345,
                ttft_ms=1e9,
                tpot_ms=1e9,
                latency_ms=1e9,
                met=MANY,
                missed=MANY,
                failed=MANY,
                refused=MANY,
            )
        ],
        dispatch_reasons={"full": MANY, "a_reason_of_a_later_version": MANY, "idle": 1},
        deliveries_pending=MANY,
        deliveries_failed=MANY,
        quotas=[QuotaState(of="tenant", name=name, limit=2**53, used=2**53) for name in NAMES],
        servers=[
            ServerState(name=f"{LONG_NAME}-{number}:4194304", here=not number, online=MANY, lines=MANY, tokens=rates)
            for number in range(3)
        ],
        job_counts=JobCounts(**dict.fromkeys(JobCounts.model_fields, MANY)),
        history=[Point(at=NOW - second, **point) for second in range(120, -1, -1)],
    )
