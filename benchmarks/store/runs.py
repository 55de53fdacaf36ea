"""One run, in a process of its own: `python -m benchmarks.store.runs bare|store INPUT FOLDER CONCURRENCY LATENCY`."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchwright.inference.inference import Call
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.custody import joined
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.worker import Worker, WorkerOptions
from batchwright.store import open_store
from batchwright.store.records import ENDED, BatchRecord

ENDPOINT = "/v1/chat/completions"
_TENANT = "default"
_LIMITS = ServiceLimits(max_lines=2**40, max_file_bytes=2**50)
_READ_BYTES = 2**20
_BETWEEN_PROBES = 0.5
_PAGE = 100


class Outcome(msgspec.Struct):
    """Seconds, bytes; latencies in milliseconds."""

    compute: float
    """Seconds from the first line to the last."""
    validate: float = 0.0
    finish: float = 0.0
    """Seconds to build the output file."""
    peak_memory: int = 0
    page_ms: list[float] = []
    """Times to read a page of results from a random place among those that existed."""
    status_ms: list[float] = []
    """Times to read the status of the batch."""


class Stub:
    """A model that takes `latency` seconds and always gives the same answer, `concurrency` at a time."""

    models = ("stub",)

    def __init__(self, concurrency: int, latency: float) -> None:
        self._concurrency = concurrency
        self._latency = latency
        self._held = 0

    @property
    def wants(self) -> int:
        return self._concurrency - self._held

    async def answer(self, call: Call) -> dict[str, Any]:
        self._held += 1
        try:
            await asyncio.sleep(self._latency)
        finally:
            self._held -= 1
        return {
            "id": call.request_id,
            "object": "chat.completion",
            "created": 1_800_000_000,
            "model": "stub",
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog. " * 4},
                "finish_reason": "stop",
                "logprobs": None,
            }],
            "usage": {"prompt_tokens": 24, "completion_tokens": 40, "total_tokens": 64},
        }  # fmt: skip

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class _Line(msgspec.Struct):
    custom_id: str
    body: dict[str, Any]


async def bare(source: Path, folder: Path, concurrency: int, latency: float) -> Outcome:
    """The loop that a client would write: `concurrency` coroutines take lines from the file and write the answers."""
    model, decode, encode = (
        Stub(concurrency, latency),
        msgspec.json.Decoder(_Line).decode,
        msgspec.json.Encoder().encode,
    )
    started = time.perf_counter()
    with source.open("rb") as lines, (folder / "output.jsonl").open("wb") as output:
        numbered = enumerate(lines, 1)

        async def work() -> None:
            for number, content in numbered:
                line = decode(content)
                body = await model.answer(Call(ENDPOINT, line.body, f"req_{number}", "batch"))
                response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
                answer = {"id": f"batch_req_{number}", "custom_id": line.custom_id, "response": response, "error": None}
                output.write(encode(answer) + b"\n")

        await asyncio.gather(*(work() for _ in range(concurrency)))
        output.flush()
        os.fsync(output.fileno())
    return Outcome(time.perf_counter() - started)


async def store(source: Path, folder: Path, concurrency: int, latency: float) -> Outcome:
    """The same file as a batch of the service, on SQLite, while a client polls it."""
    async with open_store(folder / "batches.db") as database:
        blobs = await joined(database, folder)
        worker = Worker(database, blobs, Stub(concurrency, latency), options=WorkerOptions(limits=_LIMITS))
        jobs = BatchService(database, blobs, limits=_LIMITS, on_work=worker.wake)
        with source.open("rb") as file:
            uploaded = await jobs.upload(_TENANT, source.name, _pieces(file))
        outcome = Outcome(0.0)
        async with worker:
            batch = await jobs.create_batch(_TENANT, input_file_id=uploaded.id, endpoint=ENDPOINT)
            while batch.status not in ENDED:
                await asyncio.sleep(_BETWEEN_PROBES)
                batch = await _probe(jobs, batch, outcome)
        if batch.counts.completed != batch.counts.total:
            raise RuntimeError(f"the batch did not come out right: {batch}")
        begun, ended, finished = batch.in_progress_at, batch.finalizing_at, batch.completed_at
        assert begun is not None
        assert ended is not None
        assert finished is not None
        outcome.validate, outcome.compute, outcome.finish = begun - batch.created_at, ended - begun, finished - ended
        return outcome


async def _probe(jobs: BatchService, batch: BatchRecord, outcome: Outcome) -> BatchRecord:
    started = time.perf_counter()
    batch = await jobs.batch(_TENANT, batch.id)
    jobs.progress(batch)
    outcome.status_ms.append((time.perf_counter() - started) * 1e3)
    if batch.counts.completed:
        started = time.perf_counter()
        await jobs.results(_TENANT, batch.id, after=random.randrange(batch.counts.completed), limit=_PAGE)
        outcome.page_ms.append((time.perf_counter() - started) * 1e3)
    return batch


async def _pieces(file: Any) -> AsyncIterator[bytes]:
    while piece := file.read(_READ_BYTES):
        yield piece


def input_lines(count: int) -> Iterator[bytes]:
    """An input of `count` short chats, in pieces."""
    encode = msgspec.json.Encoder().encode
    for number in range(count):
        message = {"role": "user", "content": f"Tell me something about the number {number}, in one sentence."}
        body = {"model": "stub", "messages": [message], "max_tokens": 64, "temperature": 0.0}
        yield encode({"custom_id": f"request-{number}", "method": "POST", "url": ENDPOINT, "body": body}) + b"\n"


def main(arguments: Sequence[str]) -> None:
    kind, source, folder, concurrency, latency = arguments
    run = {"bare": bare, "store": store}[kind]
    outcome = asyncio.run(run(Path(source), Path(folder), int(concurrency), float(latency)))
    outcome.peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main(sys.argv[1:])
