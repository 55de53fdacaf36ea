"""Batches of the service on one engine: in the planned order, and in that of the file, in turns."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np

from batchwright.engine.async_engine import AsyncEngine
from batchwright.inference.inference import Inference
from batchwright.inference.loading import local_inference
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.custody import blobs_of, joined
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.line_positions import LinePositions
from batchwright.service.worker.worker import Worker, WorkerOptions
from batchwright.store import open_store
from batchwright.store.records import BatchRecord
from batchwright.wire.requests import COMPLETION_URL
from benchmarks.foresight.jobs import TokenLine, renamed
from benchmarks.foresight.runs import Timed

_TENANT = "default"
_POLL = 0.1
"""Seconds between two checks whether a batch has ended."""


def batches_in_turns(
    engine: AsyncEngine, rounds: Sequence[Sequence[TokenLine]], planned: str, by_file: str
) -> dict[str, Timed]:
    """Compute the lines of each round as a batch, in both orders; the first one is the last in the next round.

    Closes the engine. `planned` and `by_file` are the names of the orders.
    """
    timed = {planned: Timed([], []), by_file: Timed([], [])}

    async def go() -> None:
        inference = local_inference(engine, None)
        for number, lines in enumerate(rounds):
            for index, name in enumerate([*timed] if number % 2 == 0 else [*timed][::-1]):
                with tempfile.TemporaryDirectory(prefix="batchwright-foresight-") as folder:
                    own = renamed(lines, 2 * number + index)
                    seconds, batch = await _computed(inference, own, Path(folder), planned=name == planned)
                timed[name].seconds.append(seconds)
                timed[name].hit_rates.append(batch.usage.cached_tokens / batch.usage.input_tokens)
        await inference.close()

    asyncio.run(go())
    return timed


async def _computed(
    inference: Inference, lines: Sequence[TokenLine], folder: Path, *, planned: bool
) -> tuple[float, BatchRecord]:
    """Seconds from the start of a worker to the end of a batch, and that batch."""
    by_file = patch.object(LinePositions, "_ranks", lambda self: np.arange(len(self._lines)))
    async with open_store(folder / "batches.db") as store:
        await joined(store, folder)
        blobs = blobs_of(folder)
        jobs = BatchService(store, blobs, limits=ServiceLimits())
        file = await jobs.upload(_TENANT, "in.jsonl", _content(lines))
        batch = await jobs.create_batch(_TENANT, input_file_id=file.id, endpoint=COMPLETION_URL)
        began = time.perf_counter()
        with nullcontext() if planned else by_file:
            async with Worker(store, blobs, inference, options=WorkerOptions(poll=_POLL)) as worker:
                await worker.until_idle()
                seconds = time.perf_counter() - began
        batch = await jobs.batch(_TENANT, batch.id)
    if batch.counts.completed < len(lines):
        raise RuntimeError(f"{batch.counts.failed} of {len(lines)} lines failed")
    return seconds, batch


async def _content(lines: Sequence[TokenLine]) -> AsyncIterator[bytes]:
    for number, line in enumerate(lines):
        fields = {"custom_id": f"{number}", "method": "POST", "url": COMPLETION_URL, "body": line.body()}
        yield json.dumps(fields).encode() + b"\n"
