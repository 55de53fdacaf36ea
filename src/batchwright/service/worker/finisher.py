"""The end of a batch: its output and error files are built from its lines in the store, then it is finished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from batchwright.errors import LeaseLost, StoreUnavailable
from batchwright.service.files.blobs import Blobs, BlobWriter
from batchwright.service.limits import ServiceLimits
from batchwright.service.new_ids import new_id
from batchwright.service.off_loop import off_loop
from batchwright.service.worker.output_lines import error_line
from batchwright.service.worker.periodic import BACKOFF
from batchwright.store.records import BatchRecord, FileRecord
from batchwright.store.store import Store

_log = logging.getLogger(__name__)
_PAGE_LINES = 4096
_WRITE_BYTES = 2**20


async def finish(
    store: Store, blobs: Blobs, worker: str, batch: BatchRecord, limits: ServiceLimits, unix_time: Callable[[], float]
) -> bool:
    """Build the files of a batch with an ending, and finish it. Returns False if it is not this worker's any more.

    A file without lines is not made. Files left by a crash are removed by `Sweeper`, and built again. Raises what the
    store raises.
    """
    if batch.ending is None:
        raise ValueError(f"{batch.id} has no ending: take_finishing gave a batch that is not to be finished")
    async with AsyncExitStack() as open_files:
        good = _LineFile(blobs, open_files, batch, "output")
        bad = _LineFile(blobs, open_files, batch, "error")
        unfinished = after = 0
        while page := await store.lines(batch.id, after=after, limit=_PAGE_LINES):
            after = page[-1].number
            unfinished += sum(line.output is None for line in page)
            await good.write([line.output for line in page if line.state == "succeeded" and line.output is not None])
            await bad.write([error_line(batch.id, line, batch.ending) for line in page if line.state != "succeeded"])
        output = await good.keep(limits, unix_time())
        errors = await bad.keep(limits, unix_time())
        finished = await _recorded(
            partial(store.finish, worker, batch.id, output=output, errors=errors, unfinished=unfinished)
        )
        if not finished:
            # A database that restarted meanwhile may have finished the batch without saying so.
            ids = [file.id for file in (output, errors) if file is not None]
            known = await store.known_files(ids)
            await blobs.remove([file_id for file_id in ids if file_id not in known])
        return finished


async def _recorded(record: Callable[[], Awaitable[bool]]) -> bool:
    """Return the result of `record`, repeated until the store is available; the built files are kept meanwhile."""
    failures = 0
    while True:
        try:
            return await record()
        except LeaseLost:
            return False
        except StoreUnavailable as error:
            _log.warning("a batch is built and not recorded yet: %s", error)
            failures += 1
            await asyncio.sleep(BACKOFF.pause(failures))


class _LineFile:
    """File of lines, which is made when the first one is written."""

    def __init__(self, blobs: Blobs, open_files: AsyncExitStack, batch: BatchRecord, what: str) -> None:
        self._blobs = blobs
        self._open_files = open_files
        self._batch = batch
        self._what = what
        self._id = new_id("file-")
        self._writer: BlobWriter | None = None
        self._buffer: list[bytes] = []
        self._size = 0

    async def write(self, lines: list[bytes]) -> None:
        self._buffer += lines
        self._size += sum(map(len, lines))
        if self._size >= _WRITE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if not self._buffer:
            return
        if self._writer is None:
            self._writer = await self._open_files.enter_async_context(self._blobs.create(self._id))
        await off_loop(self._writer.write, b"\n".join([*self._buffer, b""]))
        self._buffer.clear()
        self._size = 0

    async def keep(self, limits: ServiceLimits, now: float) -> FileRecord | None:
        """Make the file durable and return its record; None when it has no lines."""
        await self._flush()
        if self._writer is None:
            return None
        await off_loop(self._writer.keep)
        age = self._batch.output_expires_after
        return FileRecord(
            id=self._id,
            tenant=self._batch.tenant,
            filename=f"{self._batch.id}_{self._what}.jsonl",
            purpose="batch_output",
            bytes=self._writer.size,
            created_at=now,
            expires_at=now + (limits.file_age if age is None else age),
            key_id=self._batch.key_id,
        )
