"""What a store of files, batches and lines promises, whichever database is behind it.

Every method is one transaction: when it returns, what it says has happened survives a crash of the process and of the
machine, and when it raises, nothing has happened. Every method that reads or changes what belongs to a tenant takes the
tenant, and finds nothing of another's.

Every method raises `StoreUnavailable` when the database does not answer or its disk is full. There is one exception to
"nothing has happened" then: a connection to PostgreSQL that is lost in COMMIT, when the server stays away so long that
it cannot be asked what came of it. After `StoreUnavailable` a worker therefore retires and registers again, which frees
what it may hold without knowing. The methods that add something raise `Conflict` when its id is there already. Texts
with lone surrogates, and in PostgreSQL those with NUL characters, raise `InvalidRequest`.

The life of a batch:

    validating ──begin──▶ in_progress ──(last line)──▶ finalizing ──finish──▶ completed
        │                     ├──expire_batches──────────────────────finish──▶ expired
        └──reject──▶ failed   └──request_cancel──▶ cancelling ───────finish──▶ cancelled

`ending` is set in the transaction that decides the end: with the last line, at expiry, on cancelling. From then on no
line is claimed and no result is taken; `finish` writes the ids of the files, the final status and the messages of the
outbox in one transaction, so a batch is never seen as completed without its files. It also clears `ending`. A batch
that expires keeps its status until then. One that ends while it is being validated has no lines.

The lines and results of an ended batch are there for as long as a file that was built from them, `forget_files` having
the last word. Then the batch has none (`lines_removed_at`); its counts and usage stay. Their rows go in small
transactions afterwards, by `remove_lines`, so that a batch of a million lines holds up nobody.

Workers hold leases. One that does not renew its lease in time loses its claims: its late results are refused, since
`commit` compares the attempt of each line and looks at the lease in the transaction that counts the result. Thus each
line is committed exactly once, though it may be computed more than once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.limiting.rates import Change
from batchwright.policies.suspects import MAX_CRASHES
from batchwright.store.operations import (
    batches,
    claims,
    fair_claims,
    files,
    keys,
    outbox,
    quotas,
    stages,
    stored_lines,
    workers,
)
from batchwright.store.records import (
    ApiKey,
    BatchProblem,
    BatchRecord,
    BatchStatus,
    ClaimedLine,
    Delivery,
    FileRecord,
    LineResult,
    NewLine,
    Peer,
    Purpose,
    QuotaUse,
    StoredLine,
    StoreIdentity,
    Webhook,
)
from batchwright.store.transaction import Driver


class Store:
    """Files, batches, lines, the outbox and keys. Made by `open_store`; used from one event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    # Files. The bytes are not here but in `service/files/blobs.py`.

    async def add_file(self, file: FileRecord, *, defaults: Quotas = UNLIMITED) -> None:
        """Make a file visible. Raises `QuotaExceeded` where its tenant or its key has no room for it.

        `defaults`: the quotas of tenants that have none of their own, here and below. What is compared with a quota
        does not change until the file or batch is added, whatever other processes add.
        """
        await self._driver.write(files.add_file, file, defaults)

    async def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """None: there is no such file, or it is another tenant's, deleted or expired."""
        return await self._driver.read(files.file, tenant, file_id)

    async def files(
        self,
        tenant: str,
        *,
        limit: int,
        purpose: Purpose | None = None,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> list[FileRecord]:
        """By time of creation (then id). `after`: the id of the last one of the page before.

        Raises `NotFound` for an `after` that is unknown: an empty page would be taken for the end of the list.
        """
        return await self._driver.read(files.files, tenant, limit=limit, purpose=purpose, order=order, after=after)

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        """False: no such file. Raises `Conflict` for the input of a batch that has not ended."""
        return await self._driver.write(files.delete_file, tenant, file_id)

    async def take_dead_files(self, limit: int) -> list[str]:
        """Ids of files, of all tenants, that are deleted or whose time is over (and that no unfinished batch reads),
        whose bytes can be removed. They stay on this list until `forget_files`, so that a crash between the two leaves
        no bytes behind.
        """
        return await self._driver.read(files.take_dead_files, limit)

    async def forget_files(self, file_ids: Sequence[str]) -> None:
        """Their bytes are gone. A batch that had output files, and none is known any more, has no lines from now on."""
        await self._driver.write(stored_lines.forget_files, file_ids)

    async def known_files(self, file_ids: Sequence[str]) -> set[str]:
        """Which of these have a record, of whatever tenant: the rest are left-overs of a crash."""
        return await self._driver.read(files.known_files, file_ids)

    # Batches, as their owner sees them.

    async def create_batch(self, batch: BatchRecord, *, defaults: Quotas = UNLIMITED) -> BatchRecord:
        """The batch; or the one that was made with the same tenant and idempotency key before.

        Raises `NotFound` when its input file is not there any more, and `QuotaExceeded` where too much is enqueued.
        """
        return await self._driver.write(batches.create_batch, batch, defaults)

    async def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        return await self._driver.read(batches.batch, tenant, batch_id)

    async def batches(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        simple: bool = False,
        status: BatchStatus | None = None,
    ) -> list[BatchRecord]:
        """The newest first. `after`: the id of the last one of the page before. Raises `NotFound` as `files`."""
        return await self._driver.read(batches.batches, tenant, limit=limit, after=after, simple=simple, status=status)

    async def request_cancel(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Validating or in progress, without an ending: to `cancelling`, with `ending`. Otherwise nothing changes.

        The batch as it is then; None: no such batch.
        """
        return await self._driver.write(batches.request_cancel, tenant, batch_id)

    async def set_paused(self, tenant: str, batch_id: str, paused: bool) -> BatchRecord | None:
        """Lines of a paused batch are not claimed; those being computed end. Its time goes on.

        Nothing changes once it has an ending. The batch as it is then; None: no such batch.
        """
        return await self._driver.write(batches.set_paused, tenant, batch_id, paused)

    async def retry_batch(
        self, tenant: str, batch_id: str, batch: BatchRecord, *, defaults: Quotas = UNLIMITED
    ) -> BatchRecord:
        """Make `batch`, in progress, of the lines of an ended batch that did not succeed; line numbers stay.

        Of `batch` the input file, the parent, the status and the counts are set here, and the model where it is None.
        An idempotency key is honoured as in `create_batch`. Raises `NotFound` for the batch or its input file,
        `Conflict` when it has not ended, or has no such lines, or they were removed, and `QuotaExceeded` as
        `create_batch`. The lines of the new batch are its own: they stay when those of the old one go.
        """
        return await self._driver.write(batches.retry_batch, tenant, batch_id, batch, defaults)

    async def results(self, tenant: str, batch_id: str, *, after: int, limit: int) -> list[StoredLine] | None:
        """Finished lines in the order in which they were committed, those with `sequence` > `after`.

        At most `limit`, and fewer where they are large; an empty page is the last one. No line appears later at a
        place that was passed before. None: no such batch. Raises `NotFound` when they were removed.
        """
        return await self._driver.read(batches.results, tenant, batch_id, after=after, limit=limit)

    async def count_batches(self, tenant: str | None = None, *, simple: bool | None = None) -> dict[BatchStatus, int]:
        """By status; None: of all tenants, of both kinds."""
        return await self._driver.read(batches.count_batches, tenant, simple=simple)

    async def count_lines(self) -> dict[str, int]:
        """`pending`, `suspect` and `claimed` lines of all batches that are in progress, for the metrics; paused ones
        included.
        """
        return await self._driver.read(claims.count_lines)

    # Batches, as workers see them. A worker is a process that holds a lease.

    async def register_worker(
        self, name: str, lease: float, process: str | None = None, *, former: str | None = None
    ) -> str:
        """The id of a new worker, whose lease runs out `lease` seconds from now. `name` is for people to read.

        `process` is for `processes`: what others can tell from whether its process has ended. `former`: the worker that
        this process was until its lease ran out. Nobody suspects its lines on that account any longer.
        """
        return await self._driver.write(workers.register_worker, name, lease, process, former)

    async def processes(self) -> dict[str, str]:
        """What workers said of their processes, by their ids; without those that said nothing."""
        return await self._driver.read(workers.processes)

    async def renew_lease(self, worker: str, lease: float) -> bool:
        """False: it had run out; what it claimed is lost to it, and it must register again."""
        return await self._driver.write(workers.renew_lease, worker, lease)

    async def retire_worker(self, worker: str) -> int:
        """Give back all that it holds, at once. How many lines."""
        return await self._driver.write(workers.retire_worker, worker)

    async def worker_died(self, worker: str, *, max_crashes: int = MAX_CRASHES) -> int:
        """Take from a worker whose process has ended what it holds; its lines are suspects. How many lines.

        A line that was in work alone, and has been in work at `max_crashes` such deaths, is to fail.
        """
        return await self._driver.write(workers.worker_died, worker, max_crashes)

    async def reap(self, *, max_crashes: int = MAX_CRASHES) -> int:
        """The same for all workers whose lease ran out. How many lines."""
        return await self._driver.write(workers.reap, max_crashes)

    async def take_validation(self, worker: str) -> BatchRecord | None:
        """A batch to validate that nobody else does, the oldest first. Lines that an earlier try added are removed.

        A worker validates one batch at a time: one that it took before and neither began nor rejected is given again.
        None: there is none. Raises `LeaseLost`.
        """
        return await self._driver.write(stages.take_validation, worker)

    async def add_lines(self, worker: str, batch_id: str, lines: Sequence[NewLine]) -> bool:
        """False: the batch is not this worker's any more, or has an ending; nothing was added."""
        return await self._driver.write(stages.add_lines, worker, batch_id, lines)

    async def begin(self, worker: str, batch_id: str, *, total: int, model: str | None) -> bool:
        """validating → in_progress, or at once to finalizing where `total`, the number of lines that were added, is 0.

        False as in `add_lines`.
        """
        return await self._driver.write(stages.begin, worker, batch_id, total=total, model=model)

    async def reject(self, worker: str, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
        """validating → failed, with the message to the outbox; lines that were added are removed. False as above."""
        return await self._driver.write(stages.reject, worker, batch_id, problems)

    async def claim(self, worker: str, limit: int) -> list[ClaimedLine]:
        """At most `limit` lines, shared between the tenants that have any (`limiting/shares.py`), in their turns. Those
        of a tenant are of the batches that expire first; within one by number.

        Suspects go to a worker that holds nothing else, and it gets no others until they are done: as many at once as
        `policies/suspects.py` says. A worker may get nothing although there are lines, so that it can take suspects
        when it holds nothing any more. Lines that are `given_up` come with any others. Raises `LeaseLost`.
        """
        return await self._driver.write(claims.claim, worker, limit)

    async def release(self, worker: str, lines: Sequence[ClaimedLine]) -> None:
        """Give claimed lines back uncomputed. Those that are not this worker's any more are left alone."""
        await self._driver.write(claims.release, worker, lines)

    async def commit(self, worker: str, results: Sequence[LineResult]) -> list[bool]:
        """Which of the results were taken: those whose line is still at that attempt, in a batch without an ending.

        A result that was taken before is taken again, and not counted again: a call may be repeated. In the same
        transaction the counts and the usage of the batch rise, and a batch all of whose lines are finished goes to
        `finalizing`. Raises `LeaseLost`, and then none is taken.
        """
        return await self._driver.write(claims.commit, worker, results)

    async def expire_batches(self) -> list[str]:
        """Set the ending of batches in progress, or validating, whose time is over. Their ids."""
        return await self._driver.write(stages.expire_batches)

    async def ending_among(self, batch_ids: Sequence[str]) -> set[str]:
        """Which of these have an ending or are gone: a worker need not go on with their lines."""
        return await self._driver.read(batches.ending_among, batch_ids)

    async def take_finishing(self, worker: str) -> BatchRecord | None:
        """A batch with an ending whose files are to be built, that nobody else builds. None: there is none.

        A worker finishes one batch at a time: one that it took before and did not finish is given again. Raises
        `LeaseLost`.
        """
        return await self._driver.write(stages.take_finishing, worker)

    async def lines(self, batch_id: str, *, after: int, limit: int) -> list[StoredLine]:
        """All lines by number, those with `number` > `after`, to build files from. Removed ones are not there."""
        return await self._driver.read(stored_lines.lines, batch_id, after=after, limit=limit)

    async def finish(
        self, worker: str, batch_id: str, *, output: FileRecord | None, errors: FileRecord | None, unfinished: int
    ) -> bool:
        """The batch gets its files and final status, and the outbox its messages. False: not this worker's any more.

        `unfinished`: lines that had no result, which now count as failed.
        """
        return await self._driver.write(
            stages.finish, worker, batch_id, output=output, errors=errors, unfinished=unfinished
        )

    async def remove_lines(self, limit: int, *, age: float) -> bool:
        """Remove at most `limit` rows of lines and results that batches do not have any more, and fewer large ones.

        Batches that ended without any file lose theirs, too, when their output would have expired: `age` seconds after
        the end, unless they say otherwise. Whether there may be more to remove.
        """
        return await self._driver.write(stored_lines.remove_lines, limit, age=age)

    # Shares of tenants.

    async def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """What the tenant gets of the capacity, relative to others; 1 for those that were not named. Raises
        `InvalidRequest` for a weight that is not 0.01 to 1000.
        """
        await self._driver.write(fair_claims.set_tenant_weight, tenant, weight)

    async def tenant_weights(self) -> dict[str, float]:
        """Those that are not 1."""
        return await self._driver.read(fair_claims.tenant_weights)

    # Webhooks and the outbox.

    async def add_webhook(self, webhook: Webhook) -> None:
        await self._driver.write(outbox.add_webhook, webhook)

    async def webhooks(self, tenant: str) -> list[Webhook]:
        return await self._driver.read(outbox.webhooks, tenant)

    async def update_webhook(self, webhook: Webhook) -> bool:
        """Replace what stands under its id and tenant. False: no such webhook.

        What is on its way to it goes to the new URL, or is given up where it is turned off.
        """
        return await self._driver.write(outbox.update_webhook, webhook)

    async def delete_webhook(self, tenant: str, webhook_id: str) -> bool:
        """What is on its way to it is given up. False: no such webhook."""
        return await self._driver.write(outbox.delete_webhook, tenant, webhook_id)

    async def tenant_secrets(self, tenant: str, new: str) -> tuple[str, ...]:
        """The secrets that callbacks of this tenant are signed with, the newest first: `new` where it has none yet."""
        return await self._driver.write(outbox.tenant_secrets, tenant, new)

    async def rotate_tenant_secret(self, tenant: str, new: str) -> None:
        """Put `new` before the newest of them; the one before that is forgotten."""
        await self._driver.write(outbox.rotate_tenant_secret, tenant, new)

    async def take_deliveries(self, worker: str, limit: int) -> list[Delivery]:
        """Messages whose time has come and that nobody else delivers, the oldest first.

        Each counts as a try, unless the worker is gone before it says what came of it. Raises `LeaseLost`.
        """
        return await self._driver.write(outbox.take_deliveries, worker, limit)

    async def delivered(self, worker: str, delivery_id: str) -> bool:
        """It arrived; it leaves the outbox. False: not this worker's any more."""
        return await self._driver.write(outbox.delivered, worker, delivery_id)

    async def put_off(self, worker: str, delivery_id: str, *, until: float | None, reason: str) -> bool:
        """It did not: try again at `until`, or give it up (None); it is kept with its reason. False as above."""
        return await self._driver.write(outbox.put_off, worker, delivery_id, until=until, reason=reason)

    async def failed_deliveries(self, tenant: str, limit: int) -> list[tuple[Delivery, str]]:
        """Those that were given up, the newest first, with their reasons."""
        return await self._driver.read(outbox.failed_deliveries, tenant, limit)

    async def count_deliveries(self) -> dict[str, int]:
        """`pending` and `failed` messages, for the metrics."""
        return await self._driver.read(outbox.count_deliveries)

    # Keys.

    async def add_key(self, key: ApiKey, digest: bytes) -> None:
        """`digest`: SHA-256 of the key."""
        await self._driver.write(keys.add_key, key, digest)

    async def key(self, digest: bytes) -> ApiKey | None:
        """The key whose secret has this digest, if it is neither revoked nor expired.

        The secret before the last rotation counts until its time is over, which `expires_at` then says.
        """
        return await self._driver.read(keys.key, digest)

    async def any_key(self) -> bool:
        """Whether a key was ever given out. Revoked and expired ones count."""
        return await self._driver.read(keys.any_key)

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Revoked ones too, the newest first; None: of all tenants."""
        return await self._driver.read(keys.keys, tenant)

    async def update_key(self, key_id: str, changes: Mapping[str, Any]) -> ApiKey | None:
        """Replace fields of a key by name: `name`, `expires_at`, `scopes`, `weight`, `best_priority`, `quotas`.

        Of its `quotas` those are replaced that are given, by name; None: not limited any more.

        The key as it is then; None: there is no such key.
        """
        return await self._driver.write(keys.update_key, key_id, changes)

    async def rotate_key(self, key_id: str, digest: bytes, prefix: str, overlap: float) -> ApiKey | None:
        """Give a key another secret; the one before works for `overlap` seconds more, and the one before that no more.

        The key as it is then; None: there is no such key, or it is revoked.
        """
        return await self._driver.write(keys.rotate_key, key_id, digest, prefix, overlap)

    async def note_key_uses(self, used_at: Mapping[str, float]) -> None:
        """When keys were last used, by their ids. An earlier time than the one that is known changes nothing."""
        await self._driver.write(keys.note_key_uses, used_at)

    async def revoke_key(self, key_id: str) -> bool:
        """It stays on the list, with the time of the first revocation. False: there is no such key."""
        return await self._driver.write(keys.revoke_key, key_id)

    # What the store and the folder with its files recognize each other by: `service/files/custody.py`.

    async def identity(self) -> StoreIdentity | None:
        """None: the store was never used with a folder of files."""
        return await self._driver.read(files.identity)

    async def set_identity(self, old: StoreIdentity | None, new: StoreIdentity) -> bool:
        """Put `new` in the place of `old`. False: `old` is not what is there, and nothing was changed."""
        return await self._driver.write(files.set_identity, old, new)

    async def a_live_file(self) -> str | None:
        """The id of some file that is neither deleted nor expired; None: there is none."""
        return await self._driver.read(files.a_live_file)

    async def verify(self) -> None:
        """Raises `StoreUnavailable` when the records of files are damaged, as far as the database can tell.

        Takes time in proportion to the number of files. What removes files asks this first.
        """
        await self._driver.verify()

    # Quotas.

    async def tenant_quotas(self) -> dict[str, Quotas]:
        """Of the tenants that have some of their own."""
        return await self._driver.read(quotas.tenant_quotas)

    async def set_tenant_quotas(self, tenant: str, limits: Quotas, weight: float | None = None) -> None:
        """Replace the quotas of a tenant; where `limits` has none, those that are the default hold again.

        `weight`: as for `set_tenant_weight`, which is done as well or nothing is; None: it stays.
        """
        await self._driver.write(quotas.set_tenant_quotas, tenant, limits, weight)

    async def quota_use(self, tenant: str, key_id: str | None = None) -> QuotaUse:
        """What a tenant uses, or one of its keys."""
        return await self._driver.read(quotas.quota_use, tenant, key_id)

    async def kept_quotas(self, defaults: Quotas) -> list[tuple[str, int, int]]:
        """Each limit on what is kept, such as `tenant:a/storage_bytes`, with its value and what is used of it.

        `defaults`: the quotas of tenants that have none of their own.
        """
        return await self._driver.read(quotas.kept_quotas, defaults)

    async def share_rates(
        self, changes: Sequence[Change], rates: Sequence[str], *, oldest: int, since: int
    ) -> tuple[float, list[Change]]:
        """Add `changes` to the counters of all processes, and read them: those of `rates` from slot `oldest` on, all
        others from `since` on. Of two calls with changes at once the later one sees those of both.

        The time of the store comes with them, by which all processes count.
        """
        if not changes:
            return await self._driver.read(quotas.read_rates, rates, oldest, since)
        return await self._driver.write(quotas.share_rates, changes, rates, oldest, since)

    async def publish(self, worker: str, snapshot: str) -> list[Peer]:
        """What a process tells the others of itself, for as long as it renews the lease of its worker; then `peers`.

        Of two that publish at once only the later one sees both.
        """
        return await self._driver.write(workers.publish, worker, snapshot)

    async def peers(self) -> list[Peer]:
        """All processes whose leases hold, by name."""
        return await self._driver.read(workers.peers)

    async def check(self) -> None:
        """Raises `StoreUnavailable` when the database does not answer a write, for `/ready`."""
        await self._driver.check(workers.check)

    async def close(self) -> None:
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
