"""A service in virtual time: the real store and blobs, and a model whose answers are a pure function of the line."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.service.virtual import Patient, play
from tests.stores import lay_out

from batchwright.clock import ManualClock
from batchwright.errors import InvalidRequest
from batchwright.inference.inference import Call
from batchwright.service.batches.batch_progress import BatchRates
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.custody import Custody, blobs_of, joined
from batchwright.service.files.sweeper import Sweeper, Swept
from batchwright.service.limits import ServiceLimits
from batchwright.service.worker.worker import Worker, WorkerOptions
from batchwright.store import open_store
from batchwright.store.records import ENDED, BatchRecord

T = TypeVar("T")
START = 1_800_000_000.0
TENANT = "default"
ENDPOINT = "/v1/completions"


class Model:
    """Answers a prompt with its capitals, `seconds` later. `faults` says what to raise for a call, if anything."""

    models = ("model",)

    def __init__(self, slots: int = 4, seconds: float = 1.0) -> None:
        self.slots = slots
        self.seconds = seconds
        self.faults: Callable[[str], BaseException | None] = lambda prompt: None
        self.delays: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        """Of the answer to a prompt."""
        self.default_tokens = 2
        self.calls: Counter[str] = Counter()
        self.held = 0
        self.peak = 0

    @property
    def wants(self) -> int:
        return max(0, self.slots - self.held)

    async def answer(self, call: Call) -> dict[str, Any]:
        prompt = call.body["prompt"]
        assert call.traffic == "batch"
        self.calls[prompt] += 1
        self.held += 1
        self.peak = max(self.peak, self.held)
        try:
            await asyncio.sleep(self.delays.get(prompt, self.seconds))
            if (error := self.faults(prompt)) is not None:
                raise error
        finally:
            self.held -= 1
        tokens = self.tokens.get(prompt, self.default_tokens)
        return {
            "id": "cmpl",
            "object": "text_completion",
            "choices": [{"index": 0, "text": prompt.upper(), "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": tokens,
                "total_tokens": len(prompt) + tokens,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        }

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def refuse(*prompts: str) -> Callable[[str], BaseException | None]:
    """Faults: these prompts can never be computed."""
    return lambda prompt: InvalidRequest("cannot", param="prompt") if prompt in prompts else None


def line(prompt: str, custom_id: str | None = None, **rest: Any) -> bytes:
    """A line of an input for completions."""
    body = {"model": "model", "prompt": prompt}
    fields = {"custom_id": custom_id or f"id-{prompt}", "method": "POST", "url": ENDPOINT, "body": body, **rest}
    return msgspec.json.encode(fields) + b"\n"


async def pieces(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


class House:
    """A service, and workers in it. Everything lies in one folder, so another house may go on where one ended."""

    def __init__(self, folder: Path, store: Any, clock: ManualClock, limits: ServiceLimits) -> None:
        self.folder = folder
        self.store = store
        self.clock = clock
        self.limits = limits
        self.blobs = blobs_of(folder)
        self.rates = BatchRates()
        self.workers: list[Worker] = []
        self.jobs = BatchService(
            self.store, self.blobs, limits=limits, rates=self.rates, clock=clock, unix_time=self.now, on_work=self.wake
        )

    def now(self) -> float:
        return START + self.clock.now()

    def wake(self) -> None:
        for worker in self.workers:
            worker.wake()

    def worker(self, model: Model, **options: Any) -> Worker:
        """Not started yet."""
        worker = Worker(
            self.store,
            self.blobs,
            model,
            options=WorkerOptions(limits=self.limits, **options),
            rates=self.rates,
            clock=self.clock,
            unix_time=self.now,
            draw=random.Random(0),
        )
        self.workers.append(worker)
        return worker

    async def upload(self, *contents: bytes, tenant: str = TENANT) -> str:
        return (await self.jobs.upload(tenant, "input.jsonl", pieces(*contents))).id

    async def submit(self, prompts: Iterable[str], *, tenant: str = TENANT, **options: Any) -> BatchRecord:
        file_id = await self.upload(*map(line, prompts), tenant=tenant)
        return await self.jobs.create_batch(tenant, input_file_id=file_id, endpoint=ENDPOINT, **options)

    async def batch(self, batch: BatchRecord) -> BatchRecord:
        return await self.jobs.batch(batch.tenant, batch.id)

    async def die(self, worker: Worker) -> None:
        """As if its process had been killed: it tells nobody."""
        self.workers.remove(worker)
        worker._maintenance.close()
        tasks = [*worker._tasks.values(), *worker._executor._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reaches(self, batch: BatchRecord, *statuses: str) -> BatchRecord:
        """The batch, once it has one of these."""
        while True:
            if (now := await self.batch(batch)).status in statuses:
                return now
            await asyncio.sleep(0.5)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that no event tells."""
        while True:
            if reached():
                return
            await asyncio.sleep(0.25)

    async def ended(self, batch: BatchRecord) -> BatchRecord:
        return await self.reaches(batch, *ENDED)

    async def content(self, file_id: str | None, *, tenant: str = TENANT) -> list[dict[str, Any]]:
        """The lines of a file."""
        assert file_id is not None
        _, chunks = await self.jobs.content(tenant, file_id)
        content = b"".join([chunk async for chunk in chunks])
        assert content.endswith(b"\n")
        return [msgspec.json.decode(each) for each in content.splitlines()]

    async def days(self, count: float) -> Swept:
        """What a process that runs for so long does about files that no record names."""
        sweeper = Sweeper(self.store, self.blobs, Custody(self.store, self.blobs))
        done = Swept()
        for hour in range(round(count * 24)):
            swept = await sweeper.sweep(hour * 3600.0)
            done = Swept(
                **{name: value + getattr(swept, name) for name, value in asdict(done).items() if name != "estranged"},
                estranged=swept.estranged,
            )
        sweeper.close()
        return done

    def files(self) -> list[str]:
        """Names of all files of tenants on disk, and of what else lies among them."""
        return sorted(path.name for path in (self.folder / "files").glob("[0-9a-f][0-9a-f]/*"))


@asynccontextmanager
async def house(folder: Path, clock: ManualClock, limits: ServiceLimits | None = None) -> AsyncIterator[House]:
    """A service in `folder`. Its workers are not started, and not stopped."""
    lay_out(folder / "batches.db")
    async with open_store(folder / "batches.db", now=lambda: START + clock.now()) as store:
        patient: Any = Patient(store)
        await joined(patient, folder)
        yield House(folder, patient, clock, limits or ServiceLimits())


def run(folder: Path, main: Callable[[House], Coroutine[Any, Any, T]], limits: ServiceLimits | None = None) -> T:
    """Run `main` in a house in virtual time."""

    async def whole(clock: ManualClock) -> T:
        async with house(folder, clock, limits) as place:
            return await main(place)

    return play(whole)


def in_house(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in virtual time, with a house of its own as the argument `house`."""

    @functools.wraps(test)
    def whole(tmp_path: Path, **given: Any) -> None:
        run(tmp_path, lambda place: test(house=place, **given))

    del whole.__wrapped__
    signature = inspect.signature(test)
    own = [each.replace(name="tmp_path") if each.name == "house" else each for each in signature.parameters.values()]
    whole.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    return whole


def texts(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What was answered, by custom_id."""
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in lines}


def codes(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Codes of errors, by custom_id."""

    def found() -> Iterator[tuple[str, str]]:
        for each in lines:
            error = each["error"] or each["response"]["body"]["error"]
            yield each["custom_id"], error["code"]

    return dict(found())
