"""A store with messages in its outbox."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from batchwright.clock import ManualClock
from batchwright.service.webhooks.sender import Answer, Sender
from batchwright.store import Store, open_store
from batchwright.store.records import BatchProblem, BatchRecord, FileRecord

START = 1_700_000_000.0


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def whole(*given: Any, **more: Any) -> None:
        asyncio.run(test(*given, **more))

    return whole


class Scripted(Sender):
    """Answers without a network: by host as `says` tells, one answer after the other and the last again and again."""

    def __init__(self, says: Mapping[str, Sequence[Answer]]) -> None:
        self._says = says
        self.sent: list[tuple[str, Mapping[str, str], bytes]] = []

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        answers = self._says[url.split("/")[2]]
        before = sum(url == other for other, *_ in self.sent)
        self.sent.append((url, headers, body))
        return answers[min(before, len(answers) - 1)]


@asynccontextmanager
async def opened(folder: Path, clock: ManualClock) -> AsyncIterator[tuple[Store, str]]:
    """A store whose time is that of `clock`, and a worker whose lease does not end."""
    async with open_store(folder / "batchwright.db", now=clock.now) as store:
        yield store, await store.register_worker("test", 1e9)


async def end_batch(
    store: Store, worker: str, name: str, *, tenant: str = "default", callback: str | None = None
) -> None:
    """A batch that fails validation, which is told to the tenant's webhooks and to `callback`."""
    await store.add_file(FileRecord(f"file-{name}", tenant, "in.jsonl", "batch", 1, START))
    batch = BatchRecord(
        id=f"batch_{name}",
        tenant=tenant,
        endpoint="/v1/embeddings",
        input_file_id=f"file-{name}",
        completion_window="24h",
        created_at=START,
        expires_at=START + 1e9,
        callback_url=callback,
    )
    await store.create_batch(batch)
    assert await store.take_validation(worker) is not None
    assert await store.reject(worker, batch.id, [BatchProblem("invalid_json_line", "This is no JSON.", line=1)])
