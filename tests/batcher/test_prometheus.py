"""What a batcher did, as Prometheus scrapes it and as a person reads it."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import batchwright
from batchwright import DeadlineExceeded, Overloaded
from batchwright.batcher import (
    AsyncBatchProcessor,
    Batcher,
    BatcherStats,
    ContinuousBatcher,
    MemoryEfficientBatcher,
    ParallelBatchProcessor,
    SimpleBatcher,
)
from batchwright.batcher.prometheus import HasStats, export_metrics
from batchwright.clock import ManualClock
from batchwright.histograms import Histogram
from batchwright.policies import BySize, Policy

from .virtual import Model, outcome, play

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _scraped(registry: CollectorRegistry) -> Samples:
    """Values by name (without the prefix) and labels."""
    samples: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            key = sample.name.removeprefix("batchwright_batcher_"), tuple(sorted(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def _of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted({"batcher": "b", **labels}.items()))]


def test_all_figures_are_shown() -> None:
    async def main(clock: ManualClock) -> None:
        registry = CollectorRegistry()
        async with SimpleBatcher(Model(base=0.5), 2, 250, max_waiting=2, length=len, clock=clock) as batcher:
            export_metrics(batcher, "b", registry)
            await asyncio.gather(*(outcome(batcher, word) for word in ("a", "bbb", "c")))
            await outcome(batcher, "dd")
            running = [asyncio.create_task(outcome(batcher, "e")) for _ in range(2)]
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(outcome(batcher, "f"))
            await asyncio.sleep(0)
            with pytest.raises(DeadlineExceeded):
                await batcher.add_request("g", deadline=0.01)
            other = asyncio.create_task(outcome(batcher, "h"))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await batcher.add_request("i")
            samples = _scraped(registry)
            other.cancel()
            await asyncio.gather(*running, waiting)
        assert _of(samples, "requests_total") == 7
        assert _of(samples, "answers_total", outcome="succeeded") == 3
        assert _of(samples, "rejections_total", reason="overloaded") == 2
        assert _of(samples, "rejections_total", reason="deadline") == 1
        assert _of(samples, "batches_total", reason="full") == 2
        assert _of(samples, "batched_requests_total", reason="full") == 4
        assert _of(samples, "batches_total", reason="max_wait") == 1
        assert _of(samples, "batched_requests_total", reason="max_wait") == 1
        assert _of(samples, "waiting_requests") == 2
        assert _of(samples, "running_requests") == 2
        assert _of(samples, "tokens_total") == 6
        assert _of(samples, "padded_tokens_total") == 8
        assert _of(samples, "padding_efficiency_ratio") == 0.75
        assert _of(samples, "occupancy_requests") == pytest.approx(5 / 3)
        assert _of(samples, "model_seconds_total") == 1.0
        after = _scraped(registry)
        assert _of(after, "answers_total", outcome="cancelled") == 1
        assert _of(after, "waiting_requests") == 0

    play(main)


def test_histograms_count_by_time_in_seconds() -> None:
    async def main(clock: ManualClock) -> None:
        registry = CollectorRegistry()
        async with Batcher(Model(base=0.5), Policy(BySize(1)), clock=clock) as batcher:
            export_metrics(batcher, "b", registry)
            await asyncio.gather(*(batcher.compute("x") for _ in range(4)))
        samples = _scraped(registry)
        queue = [_of(samples, "queue_time_seconds_bucket", le=le) for le in ("0.001", "0.25", "0.5", "1.0", "2.5")]
        assert queue == [1, 1, 2, 3, 4]
        assert _of(samples, "queue_time_seconds_bucket", le="+Inf") == 4
        assert (_of(samples, "queue_time_seconds_count"), _of(samples, "queue_time_seconds_sum")) == (4, 3.0)
        assert (_of(samples, "model_time_seconds_count"), _of(samples, "model_time_seconds_sum")) == (4, 2.0)
        assert (_of(samples, "latency_seconds_count"), _of(samples, "latency_seconds_sum")) == (4, 5.0)

    play(main)


class _Spelling:
    """Generates two tokens."""

    async def generate_step(self, prompts: list[Any], partial_outputs: list[str]) -> list[str]:
        await asyncio.sleep(0.1)
        return ["a" if len(partial) < 2 else "" for partial in partial_outputs]


@pytest.mark.parametrize(
    "make",
    [
        lambda clock: Batcher(Model(), clock=clock),
        lambda clock: AsyncBatchProcessor(Model(), clock=clock),
        lambda clock: ParallelBatchProcessor([Model(), Model()], clock=clock),
        lambda clock: MemoryEfficientBatcher(Model(), 7, clock=clock),
        lambda clock: ContinuousBatcher(_Spelling(), clock=clock),
    ],
)
def test_every_batcher_and_processor_has_them(make: Callable[[ManualClock], Any]) -> None:
    async def main(clock: ManualClock) -> None:
        registry = CollectorRegistry()
        async with make(clock) as made:
            export_metrics(made, "b", registry)
            ask = made.submit if isinstance(made, AsyncBatchProcessor | ParallelBatchProcessor) else made.add_request
            await asyncio.gather(*(ask("x") for _ in range(3)))
        samples = _scraped(registry)
        assert _of(samples, "answers_total", outcome="succeeded") == 3
        if isinstance(made, ParallelBatchProcessor):
            assert [_of(samples, "replica_requests_total", replica=replica) for replica in "01"] == [3, 0]
            assert [_of(samples, "replica_failures_total", replica=replica) for replica in "01"] == [0, 0]
            assert _of(samples, "replica_pause_seconds", replica="0") == 0
        if isinstance(made, MemoryEfficientBatcher):
            assert _of(samples, "memory_limit_bytes") == 7e6
            assert _of(samples, "out_of_memory_total") == 0
        if isinstance(made, ContinuousBatcher):
            assert _of(samples, "time_to_first_token_seconds_count") == 3
            assert _of(samples, "generated_tokens_total") == 6

    play(main)


def test_what_only_has_stats_is_shown_with_what_its_stats_have() -> None:
    class Other:
        def stats(self) -> BatcherStats:
            stats = BatcherStats(requests=2)
            stats.count_batch("of its own", 5)
            return stats

    registry = CollectorRegistry()
    other: HasStats = Other()
    export_metrics(other, "b", registry)
    samples = _scraped(registry)
    assert _of(samples, "requests_total") == 2
    assert _of(samples, "batched_requests_total", reason="of its own") == 5


def test_several_batchers_share_a_registry_and_one_that_is_gone_is_no_longer_shown() -> None:
    registry, another = CollectorRegistry(), CollectorRegistry()
    first, second = Batcher(Model()), Batcher(Model())
    export_metrics(first, "first", registry)
    export_metrics(second, "second", registry)
    export_metrics(first, "first", another)
    assert _names(registry) == {"first", "second"}
    with pytest.raises(ValueError, match="name='second'"):
        export_metrics(first, "second", registry)
    del first
    gc.collect()
    assert _names(registry) == {"second"}
    assert _names(another) == set()
    replaced = Batcher(Model())
    export_metrics(replaced, "first", registry)
    assert _names(registry) == {"first", "second"}


def test_metrics_of_the_same_name_are_refused_by_the_registry() -> None:
    registry = CollectorRegistry()
    Counter("batchwright_batcher_requests", "Somebody else's.", registry=registry)
    with pytest.raises(ValueError, match="batchwright_batcher_requests"):
        export_metrics(Batcher(Model()), "b", registry)


def _names(registry: CollectorRegistry) -> set[str]:
    return {dict(labels)["batcher"] for _, labels in _scraped(registry)}


def test_without_prometheus_client_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import batchwright\n"
        "try:\n    batchwright.export_metrics\n"
        "except batchwright.MissingExtra as error:\n    print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "batchwright[prometheus]" in shown
    assert batchwright.export_metrics is export_metrics


def test_values_are_counted_up_to_bounds() -> None:
    histogram = Histogram()
    for value in (-1.0, 0.0, 1.0, 5.0, 5.0, 9.0, 80.0):
        histogram.add(value)
    assert histogram.at_most([0.5, 1.0, 5.0, 10.0]) == [2, 3, 5, 6, 7]
    assert histogram.at_most([]) == [7]
    assert Histogram().at_most([1.0]) == [0, 0]


def test_the_summary_says_why_it_did_not_batch() -> None:
    async def main(clock: ManualClock) -> None:
        async with SimpleBatcher(Model(base=0.5), 2, 250, max_waiting=2, length=len, clock=clock) as batcher:
            await asyncio.gather(*(outcome(batcher, word) for word in ("a", "bbb", "c")))
            for _ in range(3):
                await outcome(batcher, "dd")
            stats = batcher.stats()
        assert stats.sizes_by_reason == {"full": 2.0, "max_wait": 1.0}
        assert str(stats).splitlines() == [
            "5 requests: 5 succeeded",
            "4 batches, 1.2 requests each, dispatched because",
            "   75% max_wait: 1.0 requests each (the oldest had waited as long as it may)",
            "   25% full: 2.0 requests each (nothing more would have fitted)",
            "padding: 17% of the padded tokens",
            "waited in the queue: median 248 ms, 99% within 248 ms",
            "a batch in the model: median 497 ms, 99% within 497 ms, 8 tokens/s",
            "not taken: 1 queue full",
        ]

    play(main)


class _Refusing(Model):
    """Refuses long prompts, which it does not compute, with an error object."""

    def answer(self, prompt: Any) -> Any:
        return ValueError("too long") if len(prompt) > 9 else super().answer(prompt)


def test_what_the_model_gave_an_error_for_counts_as_nothing_computed() -> None:
    async def main(clock: ManualClock) -> None:
        async with Batcher(_Refusing(base=0.5), length=len, clock=clock) as batcher:
            words = ["ab"] * 6 + ["abc"] * 3 + ["x" * 1000]
            await asyncio.gather(*(outcome(batcher, word) for word in words))
            stats = batcher.stats()
            assert (stats.succeeded, stats.failed, stats.items) == (9, 1, 10)
            assert (stats.tokens, stats.cells) == (21, 27)
            assert stats.tokens_per_second == 60.0
            await outcome(batcher, "x" * 1000)
            stats = batcher.stats()
            assert (stats.tokens, stats.cells, stats.model_seconds) == (21, 27, 1.0)

    play(main)


def test_the_summary_of_nothing_and_of_trouble() -> None:
    assert str(BatcherStats()).splitlines() == ["0 requests: none has come yet", "no batch has been dispatched"]
    troubled = BatcherStats(requests=3, failed=2, waiting=1, refused=1, too_large=2, splits=4, out_of_memory=3)
    troubled.memory_limit_mb = 7.5
    assert troubled.summary().splitlines() == [
        "3 requests: 2 failed, 1 waiting",
        "no batch has been dispatched",
        "not taken: 1 certain to be late, 2 too large",
        "batches tried again: 4 divided after a failure, 3 out of memory",
        "memory for a batch: 7.5 MB now",
    ]
