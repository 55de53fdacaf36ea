"""Random failures and crashes: every line has exactly one result, and counts are right, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples
from tests.service.support import TENANT, House, Model, codes, run, texts
from tests.stores import in_memory

from batchwright.errors import (
    BatchwrightError,
    EndpointError,
    EndpointUnreachable,
    InvalidRequest,
    Overloaded,
    StoreUnavailable,
)
from batchwright.service.worker.worker import Worker
from batchwright.store.records import BatchRecord


class Chaos:
    """Draws what goes wrong. Without `on`, nothing does."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.on = True

    def fault(self, prompt: str) -> BatchwrightError | None:
        if prompt.endswith("!"):
            return InvalidRequest("never")
        if not self.on or self.draw.random() > 0.2:
            return None
        return self.draw.choice([Overloaded("full"), EndpointUnreachable("reset"), EndpointError("busy", status=503)])

    async def before(self, name: str) -> None:
        if self.on and self.draw.random() < 0.05:
            raise StoreUnavailable("away")

    async def after(self, name: str) -> None:
        if self.on and self.draw.random() < 0.02:
            # It was done, and the answer was lost on the way.
            raise StoreUnavailable("away")


async def _lives(place: House, chaos: Chaos, batches: list[BatchRecord], crashes: int) -> list[BatchRecord]:
    for _ in range(crashes):
        for _ in range(chaos.draw.randint(1, 2)):
            await _worker(place, chaos).start()
        await asyncio.sleep(chaos.draw.uniform(0.0, 20.0))
        for worker in [*place.workers]:
            await place.die(worker)
    chaos.on = False
    worker = _worker(place, chaos)
    await worker.start()
    ended = [await place.ended(batch) for batch in batches]
    await worker.stop()
    return ended


def _worker(place: House, chaos: Chaos) -> Worker:
    model = Model(slots=chaos.draw.randint(1, 5), seconds=chaos.draw.uniform(0.1, 3.0))
    model.faults = chaos.fault
    # Whoever kills at random, and often, kills innocent lines as often as one likes.
    return place.worker(model, lease=10.0, max_crashes=1000)


@settings(max_examples=examples(6, long=15))
@given(st.integers(0, 2**32), st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 4))
def test_each_line_is_committed_once_whatever_fails(seed: int, sizes: list[int], crashes: int) -> None:
    chaos = Chaos(seed)
    prompts = [
        [f"{number}-{place}{'!' if place % 7 == 3 else ''}" for place in range(size)]
        for number, size in enumerate(sizes)
    ]

    async def main(place: House) -> None:
        batches = [await place.submit(each) for each in prompts]
        place.store.before, place.store.after = chaos.before, chaos.after
        ended = await _lives(place, chaos, batches, crashes)
        for batch, each in zip(ended, prompts, strict=True):
            await _check(place, batch, each)
        await place.days(2.2)
        assert await place.store.known_files(place.files()) == {*place.files()}
        assert not [*place.blobs.quarantine.glob("*")]

    with in_memory() as folder:
        run(folder, main)


async def _check(place: House, batch: BatchRecord, prompts: list[str]) -> None:
    bad = [prompt for prompt in prompts if prompt.endswith("!")]
    good = [prompt for prompt in prompts if not prompt.endswith("!")]
    assert batch.status == "completed"
    assert (batch.counts.total, batch.counts.completed + batch.counts.failed) == (len(prompts), len(prompts))
    results = await place.jobs.results(TENANT, batch.id, limit=1000)
    assert [each.sequence for each in results] == list(range(1, len(prompts) + 1))
    assert Counter(each.number for each in results) == Counter(range(1, len(prompts) + 1))
    answered = texts(await place.content(batch.output_file_id)) if batch.output_file_id else {}
    failed = codes(await place.content(batch.error_file_id)) if batch.error_file_id else {}
    assert batch.counts.completed == len(answered)
    assert batch.counts.failed == len(failed)
    assert {*answered} | {*failed} == {f"id-{prompt}" for prompt in prompts}
    assert all(answered[f"id-{prompt}"] == prompt.upper() for prompt in good if f"id-{prompt}" in answered)
    assert {f"id-{prompt}" for prompt in bad} <= {*failed}
    assert batch.usage.output_tokens == 2 * len(answered)
