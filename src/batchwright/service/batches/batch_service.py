"""Operations on files and batches, for HTTP and the command line. The work is done by workers (`worker.py`), in this
process or in others.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec

from batchwright.clock import Clock, MonotonicClock
from batchwright.errors import InvalidRequest, NotFound, QuotaExceeded, StoreUnavailable
from batchwright.jobs.table_requests import TableOptions
from batchwright.limiting.estimates import tokens_of_bytes
from batchwright.service.access.peers import read_snapshot
from batchwright.service.batches import batch_checks, simple_batches
from batchwright.service.batches.batch_forecasts import BatchForecasts
from batchwright.service.batches.batch_progress import BatchRates, ProgressEstimate
from batchwright.service.batches.simple_batches import Prompts, SimpleOutput
from batchwright.service.batches.table_conversion import Converted, TableConverter
from batchwright.service.files.blobs import Blobs
from batchwright.service.limits import ServiceLimits
from batchwright.service.new_ids import new_id
from batchwright.service.off_loop import off_loop
from batchwright.store.records import ApiKey, BatchRecord, Endpoint, FileRecord, StoredLine
from batchwright.store.store import Store

_PAGE_LINES = 256
_T = TypeVar("_T")


class BatchService:
    """Operations on the files and batches of all tenants; each method is for one tenant.

    All raise `StoreUnavailable` when the database does not answer or a disk is full, and `NotFound` for an id that does
    not exist or is another tenant's.
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        *,
        limits: ServiceLimits | None = None,
        rates: BatchRates | None = None,
        clock: Clock | None = None,
        unix_time: Callable[[], float] = time.time,
        on_work: Callable[[], None] = lambda: None,
    ) -> None:
        """`rates`: shared with the worker of this process, if it has one. `on_work`: called when there is new work for
        workers, such as `Worker.wake`.
        """
        self._store = store
        self._blobs = blobs
        self._limits = limits or ServiceLimits()
        self._rates = rates or BatchRates()
        self._tables = TableConverter()
        self._clock = clock or MonotonicClock()
        self._unix_time = unix_time
        self._on_work = on_work
        self.files = partial(store.files, limit=10_000)
        """Operation that returns a page of a tenant's files, as `Store.files`."""
        self.batches = partial(store.batches, limit=20)
        """Operation that returns a page of a tenant's batches, as `Store.batches`."""
        self.count_batches = store.count_batches
        """Operation that returns the number of a tenant's batches by status, as `Store.count_batches`."""

    # Files.

    async def upload(
        self,
        tenant: str,
        filename: str,
        chunks: AsyncIterable[bytes],
        *,
        purpose: str = "batch",
        expires_after: float | Callable[[], float | None] | None = None,
        key: ApiKey | None = None,
    ) -> FileRecord:
        """Store an input file as it arrives.

        `expires_after`: seconds from now; None: the default; a function is called at the end, since in a form it may
        come last. `key`: the key of the upload.

        Raises `QuotaExceeded` when there is no room for the file, and `InvalidRequest` with code `file_too_large` past
        a limit or `upload_too_slow` when the upload stalls. Nothing of it is left then, nor if `chunks` raises or the
        caller is cancelled.
        """
        if purpose != "batch":
            raise InvalidRequest(f"purpose={purpose!r}: must be 'batch'", param="purpose")
        if not callable(expires_after):
            batch_checks.expiry_of(expires_after, "expires_after")
        filename = batch_checks.filename_of(filename)
        async with self._received(tenant, filename, chunks, expires_after, key) as file:
            await self._recorded(file, self._store.add_file(file, defaults=self._limits.default_quotas))
        return file

    @asynccontextmanager
    async def _received(
        self,
        tenant: str,
        filename: str,
        chunks: AsyncIterable[bytes],
        expires_after: float | Callable[[], float | None] | None,
        key: ApiKey | None,
    ) -> AsyncIterator[FileRecord]:
        """Store the bytes of an input file, whose record is to be added inside the block."""
        await self._require_room()
        file_id = new_id("file-")
        async with self._blobs.upload(file_id, chunks, self._limits) as blob:
            asked = expires_after() if callable(expires_after) else expires_after
            age = batch_checks.expiry_of(asked, "expires_after")
            await off_loop(blob.keep)
            now = self._unix_time()
            yield FileRecord(
                id=file_id,
                tenant=tenant,
                filename=filename,
                purpose="batch",
                bytes=blob.size,
                created_at=now,
                expires_at=now + (self._limits.file_age if age is None else age),
                lines=blob.lines,
                key_id=None if key is None else key.id,
            )

    async def _recorded(self, file: FileRecord, adding: Awaitable[_T]) -> _T:
        """Return the result of `adding`, which adds the record of a file; the bytes go if it does not."""
        try:
            return await adding
        except QuotaExceeded:
            await self._blobs.remove([file.id])
            raise
        except StoreUnavailable:
            # The database may have added it before it went away. If it cannot be asked, a sweep removes the file.
            with suppress(StoreUnavailable):
                if not await self._store.known_files([file.id]):
                    await self._blobs.remove([file.id])
            raise

    async def requests_of_table(
        self, tenant: str, file_id: str, options: TableOptions, *, key: ApiKey | None = None
    ) -> tuple[FileRecord, Converted]:
        """Store the input of a batch that is made from an uploaded table, or from a file of prompts.

        Raises what `upload` raises, `InvalidRequest` for a table that cannot be turned into requests, and `Overloaded`
        while too many others are being converted.
        """
        table = await self.file(tenant, file_id)
        options = msgspec.structs.replace(options, name=table.filename, max_line_bytes=int(self._limits.max_line_bytes))
        name = f"{PurePath(table.filename).stem or 'table'}.requests.jsonl"
        with (
            await off_loop(self._blobs.open, file_id) as content,
            self._tables.conversion(tenant, content, options) as conversion,
        ):
            async with aclosing(conversion.lines()) as lines:
                return await self.upload(tenant, name, lines, key=key), conversion.outcome

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        return _found(await self._store.file(tenant, file_id), "file", file_id)

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises `Conflict` for the input of a batch that has not ended."""
        if not await self._store.delete_file(tenant, file_id):
            raise _missing("file", file_id)
        self._on_work()

    async def content(
        self, tenant: str, file_id: str, start: int = 0, stop: int | None = None
    ) -> tuple[FileRecord, AsyncGenerator[bytes]]:
        """Return a file and its bytes from `start` to `stop` (exclusive) in pieces. Close it to end early."""
        file = await self.file(tenant, file_id)
        if not await self._blobs.exists(file_id):
            raise _missing("content of file", file_id)
        return file, self._blobs.read(file_id, start, stop)

    # Batches.

    async def create_batch(
        self,
        tenant: str,
        *,
        input_file_id: str,
        endpoint: str,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after: float | None = None,
        idempotency_key: str | None = None,
        callback_url: str | None = None,
        key: ApiKey | None = None,
    ) -> BatchRecord:
        """Make a batch, which a worker will validate, or return the one made with the same `idempotency_key` before.

        `output_expires_after`: seconds from the creation of its files. `key`: the key of the request. Raises
        `InvalidRequest`, also when the `idempotency_key` was used for a different request.
        """
        batch = self._new_batch(
            tenant,
            input_file_id,
            batch_checks.endpoint_of(endpoint, responses=self._limits.responses),
            completion_window,
            key,
            metadata=batch_checks.metadata_of(metadata),
            output_expires_after=batch_checks.expiry_of(output_expires_after, "output_expires_after"),
            idempotency_key=batch_checks.idempotency_key_of(idempotency_key),
            callback_url=callback_url,
        )
        await self._require_room()
        file = await self._store.file(tenant, input_file_id)
        # A file that is gone may have existed when a batch was made with this key.
        if file is not None:
            if file.purpose != "batch":
                message = f"input_file_id={input_file_id!r}: its purpose is {file.purpose!r}, it must be 'batch'"
                raise InvalidRequest(message, param="input_file_id")
            batch = await self._measured(batch, file)
        made = await self._store.create_batch(batch, defaults=self._limits.default_quotas)
        batch_checks.require_same(made, batch)
        self._on_work()
        return made

    async def create_simple(
        self,
        tenant: str,
        prompts: Prompts,
        *,
        callback_url: str | None = None,
        idempotency_key: str | None = None,
        key: ApiKey | None = None,
    ) -> BatchRecord:
        """Make a batch of prompts; otherwise like `create_batch`."""
        prompts.check(self._limits)
        batch = self._new_batch(
            tenant,
            "",
            simple_batches.ENDPOINT,
            "24h",
            key,
            simple=True,
            idempotency_key=batch_checks.idempotency_key_of(idempotency_key),
            callback_url=callback_url,
        )
        made = None
        if batch.idempotency_key is not None:
            made = await self._store.batch_of_idempotency_key(tenant, batch.idempotency_key)
        if made is None:
            made = await self._add_simple(batch, prompts, key)
        if made.id != batch.id:
            content = b"".join([line async for line in simple_batches.input_of(prompts)])
            same = await self._blobs.holds(made.input_file_id, content)
            batch_checks.require_same(made, replace(batch, input_file_id=made.input_file_id) if same else batch)
        self._on_work()
        return made

    async def _add_simple(self, batch: BatchRecord, prompts: Prompts, key: ApiKey | None) -> BatchRecord:
        """Add a batch together with the file of its prompts, or return the one made with the same key meanwhile."""
        name = f"{batch.id}_prompts.jsonl"
        async with (
            aclosing(simple_batches.input_of(prompts)) as chunks,
            self._received(batch.tenant, name, chunks, None, key) as file,
        ):
            batch = await self._measured(replace(batch, input_file_id=file.id), file)
            adding = self._store.create_batch(batch, file=file, defaults=self._limits.default_quotas)
            made = await self._recorded(file, adding)
            if made.id != batch.id:
                await self._blobs.remove([file.id])
        return made

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        return _found(await self._store.batch(tenant, batch_id), "batch", batch_id)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Cancel a batch: results stay, running lines are dropped. No effect on a batch that is ending or has ended."""
        batch = _found(await self._store.request_cancel(tenant, batch_id), "batch", batch_id)
        self._on_work()
        return batch

    async def pause(self, tenant: str, batch_id: str) -> BatchRecord:
        """Pause a batch: no lines are started until `resume`. The completion window is not extended."""
        return _found(await self._store.set_paused(tenant, batch_id, True), "batch", batch_id)

    async def resume(self, tenant: str, batch_id: str) -> BatchRecord:
        batch = _found(await self._store.set_paused(tenant, batch_id, False), "batch", batch_id)
        self._on_work()
        return batch

    async def retry(
        self,
        tenant: str,
        batch_id: str,
        *,
        completion_window: str | None = None,
        idempotency_key: str | None = None,
        key: ApiKey | None = None,
    ) -> BatchRecord:
        """Make a batch of the lines that did not succeed, with the same completion window unless another is given.

        Raises `Conflict` when the batch has not ended, has no such lines, or lost them with its output files.
        """
        old = await self.batch(tenant, batch_id)
        new = self._new_batch(
            tenant,
            old.input_file_id,
            old.endpoint,
            completion_window or old.completion_window,
            key,
            metadata=old.metadata,
            output_expires_after=old.output_expires_after,
            callback_url=old.callback_url,
            simple=old.simple,
            idempotency_key=batch_checks.idempotency_key_of(idempotency_key),
        )
        await self._require_room()
        made = await self._store.retry_batch(tenant, batch_id, new, defaults=self._limits.default_quotas)
        batch_checks.require_same(made, replace(new, parent_id=batch_id))
        self._on_work()
        return made

    async def results(self, tenant: str, batch_id: str, *, after: int = 0, limit: int = 100) -> list[StoredLine]:
        """Return finished lines of a batch, running or not, in the order in which they were finished.

        `after`: `sequence` of the last line of the previous page. Returns at most `limit` lines, fewer if they are
        large. Raises `NotFound` also when they were removed with the output files.
        """
        return _found(await self._store.results(tenant, batch_id, after=after, limit=limit), "batch", batch_id)

    async def outputs(self, tenant: str, batch_id: str) -> list[SimpleOutput] | None:
        """Return the output for each prompt of a simple batch, in order; None: they were removed with its files."""
        batch = await self.batch(tenant, batch_id)
        if not batch.simple:
            raise _missing("simple batch", batch_id)
        return await simple_batches.outputs_of(self._store, batch)

    def progress(self, batch: BatchRecord) -> ProgressEstimate:
        """Return the progress of a batch that was read just now."""
        return self._rates.progress(batch, self._clock.now())

    async def foresee(self, batches: Sequence[BatchRecord]) -> list[ProgressEstimate]:
        """Return the progress of batches that were read just now, from what the processes of the store have published.

        For programs that do not take part in the exchange between these processes.
        """
        snapshots = [read_snapshot(peer) for peer in await self._store.peers()]
        rates = BatchRates(BatchForecasts(lambda: snapshots))
        return [rates.progress(batch, self._clock.now()) for batch in batches]

    async def _require_room(self) -> None:
        """Raise `StoreUnavailable` unless disk space is left, so that new batches do not use that of running ones."""
        await off_loop(self._blobs.require_room, self._limits.min_free_disk)

    async def _measured(self, batch: BatchRecord, file: FileRecord) -> BatchRecord:
        """Return `batch` with the estimated size of its input, for quotas."""
        lines = file.lines
        if lines is None:
            lines = await off_loop(self._count_lines, file.id)
        return replace(batch, enqueued_lines=lines, enqueued_tokens=tokens_of_bytes(file.bytes))

    def _count_lines(self, file_id: str) -> int:
        """Count the lines of a file made before uploads counted them; 0 if it is gone, which its batch will report."""
        try:
            with self._blobs.open(file_id) as content:
                return sum(1 for _ in content)
        except NotFound:
            return 0

    def _new_batch(
        self,
        tenant: str,
        input_file_id: str,
        endpoint: Endpoint,
        completion_window: str,
        key: ApiKey | None,
        **chosen: Any,
    ) -> BatchRecord:
        """Return a new batch; `chosen`: further fields of `BatchRecord`."""
        now = self._unix_time()
        return BatchRecord(
            id=new_id("batch_"),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=now,
            expires_at=now + batch_checks.window_seconds(completion_window, self._limits.max_completion_window),
            key_id=None if key is None else key.id,
            best_priority=None if key is None else key.best_priority,
            **chosen,
        )


def _missing(what: str, its_id: str) -> NotFound:
    return NotFound(f"no {what} {its_id!r}")


def _found(record: _T | None, what: str, its_id: str) -> _T:
    if record is None:
        raise _missing(what, its_id)
    return record
