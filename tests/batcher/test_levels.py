"""Latency, share in time and refusals by priority, of every kind of batcher."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from batchwright import DeadlineExceeded, Overloaded
from batchwright.batcher import Batcher, ContinuousBatcher, PriorityBatcher
from batchwright.batcher.prometheus import export_metrics
from batchwright.clock import ManualClock

from .virtual import Model, at, outcome, play


def test_each_priority_has_its_latency_its_share_in_time_and_its_refusals() -> None:
    async def main(clock: ManualClock) -> None:
        registry = CollectorRegistry()
        batcher = PriorityBatcher(Model(base=0.5), 2, 0, max_waiting=4, clock=clock)
        export_metrics(batcher, "b", registry)
        runs = [asyncio.create_task(outcome(batcher, f"first {number}", priority=9)) for number in range(2)]
        await asyncio.sleep(0.1)
        # Computed at 0.5 and 1.0; the last of them is late while it waits.
        runs += [asyncio.create_task(outcome(batcher, "urgent", priority=0, deadline=2.0)) for _ in range(2)]
        runs.append(asyncio.create_task(outcome(batcher, "patient", priority=9)))
        runs.append(asyncio.create_task(outcome(batcher, "late", priority=9, deadline=0.95)))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await batcher.add_request("too much", priority=9)
        await asyncio.gather(*runs)
        busy = asyncio.create_task(outcome(batcher, "busy", priority=9))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded):
            await batcher.add_request("hopeless", priority=0, deadline=0.2)
        await busy
        stats = batcher.stats()
        urgent, patient = stats.levels[0], stats.levels[9]
        assert (urgent.succeeded, urgent.in_time, urgent.late, urgent.refused) == (2, 2, 0, 1)
        assert (patient.succeeded, patient.in_time, patient.late, patient.refused) == (4, 0, 1, 1)
        assert (urgent.in_time_share, patient.in_time_share) == (1.0, 0.0)
        assert urgent.latency_ms.maximum == pytest.approx(900.0)
        assert stats.latency_ms.count == stats.succeeded == 6
        assert [line for line in str(stats).splitlines() if line.startswith("  priority")] == [
            "  priority 0: 2 succeeded, median 900 ms, 99% within 900 ms, 100.0% in time, 1 refused",
            "  priority 9: 4 succeeded, median 497 ms, 99% within 1,391 ms, 0.0% in time, 1 refused",
        ]
        text = generate_latest(registry).decode()
        prefix = "batchwright_batcher_priority_"
        assert prefix + 'requests_total{batcher="b",outcome="refused",priority="9"} 1.0' in text
        assert prefix + 'deadlines_total{batcher="b",outcome="late",priority="9"} 1.0' in text
        assert prefix + 'latency_seconds_count{batcher="b",priority="0"} 2.0' in text
        assert 'batchwright_batcher_model_down{batcher="b"} 0.0' in text
        await batcher.close()

    play(main)


def test_clients_cannot_make_more_than_ten_levels() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(Model(), clock=clock) as batcher:
            await asyncio.gather(*(batcher.compute("x", priority=number) for number in range(1000)))
            levels = batcher.stats().levels
            assert (len(levels), levels["other"].succeeded) == (10, 991)

    play(main)


def test_failures_and_token_level_batchers_count_by_priority() -> None:
    class Steps:
        async def generate_step(self, prompts: list[str], partial_outputs: list[Any]) -> list[Any]:
            await asyncio.sleep(0.1)
            return [ValueError(prompt) if prompt == "bad" else "" for prompt in prompts]

    async def main(clock: ManualClock) -> None:
        async with ContinuousBatcher(Steps(), 1, max_waiting=2, clock=clock) as batcher:
            runs = [
                batcher.add_request("good", priority=1, deadline=1.0),
                batcher.add_request("bad", priority=2),
                at(0.01, batcher.add_request("late", priority=3, deadline=0.01)),
            ]
            await asyncio.gather(*runs)
            levels = batcher.stats().levels
            assert {name: (each.succeeded, each.failed, each.in_time, each.late) for name, each in levels.items()} == {
                1: (1, 0, 1, 0),
                2: (0, 1, 0, 0),
                3: (0, 0, 0, 1),
            }

    play(main)
