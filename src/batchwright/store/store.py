"""The store of files, batches and lines, with the promises that it keeps whichever database is behind it.

Every method is one transaction: when it returns, its changes survive a crash of the process and of the machine, and
when it raises, nothing has changed. Methods that read or change what belongs to a tenant take the tenant, and find
nothing of another tenant.

Every method raises `StoreUnavailable` when the database does not answer or its disk is full. Only then may something
have changed all the same: when a connection to PostgreSQL is lost in COMMIT, and the server stays away too long to be
asked about the outcome. After `StoreUnavailable` a worker therefore retires and registers again, which frees what it
may hold without knowing. Methods that add something raise `Conflict` when its id is there already. Texts with lone
surrogates, and in PostgreSQL those with NUL characters, raise `InvalidRequest`.

The life of a batch:

    validating ──begin──▶ in_progress ──(last line)──▶ finalizing ──finish──▶ completed
        │                     ├──expire_batches──────────────────────finish──▶ expired
        └──reject──▶ failed   └──request_cancel──▶ cancelling ───────finish──▶ cancelled

`ending` is set in the transaction that decides the end: with the last line, at expiry, on cancelling. From then on no
line is claimed and no result is taken. `finish` clears `ending` and writes the ids of the files, the final status and
the messages of the outbox in one transaction, so a batch is never seen as completed without its files. A batch that
expires keeps its status until then. A batch that ends while it is being validated has no lines.

The lines and results of an ended batch are kept until `forget_files` has forgotten all files that were built from them.
Then the batch has none (`lines_removed_at`); its counts and usage stay. `remove_lines` removes their rows afterwards in
small transactions, so that a batch of a million lines does not hold up other transactions.

Workers hold leases. A worker that does not renew its lease in time loses its claims: its late results are refused,
since `commit` compares the attempt of each line and checks the lease in the transaction that counts the result. Thus
each line is committed exactly once, though it may be computed more than once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from batchwright.limiting.quotas import UNLIMITED, Quotas
from batchwright.limiting.rates import Change
from batchwright.policies.suspects import MAX_CRASHES
from batchwright.store.operations import batches, files, keys, outbox, quotas, workers
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
    """Files, batches, lines, the outbox and keys in a database. Made by `open_store`; used from one event loop."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    # Records of files, whose bytes are stored by `service/files/blobs.py`.

    async def add_file(self, file: FileRecord, *, defaults: Quotas = UNLIMITED) -> None:
        """Make a file visible. Raises `QuotaExceeded` if its tenant or its key has no room for it.

        `defaults`, here and below: the quotas of tenants that have none of their own. The use that is compared with a
        quota does not change until the file or batch is added, whatever other processes add.
        """
        await self._driver.write(files.add_file, file, defaults)

    async def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """A file; None if there is none, or it belongs to another tenant, or it was deleted or has expired."""
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
        """A page of the files of a tenant, by time of creation, then id. `after`: the last id of the page before.

        Raises `NotFound` for an unknown `after`: an empty page would be taken for the end of the list.
        """
        return await self._driver.read(files.files, tenant, limit=limit, purpose=purpose, order=order, after=after)

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; False if there is none. Raises `Conflict` for the input of a batch that has not ended."""
        return await self._driver.write(files.delete_file, tenant, file_id)

    async def take_dead_files(self, limit: int) -> list[str]:
        """Ids of files, of all tenants, whose bytes can be removed: they were deleted, or expired and are not read by
        an unfinished batch. They stay on this list until `forget_files`, so that a crash in between leaves no bytes.
        """
        return await self._driver.read(files.take_dead_files, limit)

    async def forget_files(self, file_ids: Sequence[str]) -> None:
        """Forget files whose bytes were removed. Batches that lose their last output file thereby lose their lines."""
        await self._driver.write(batches.forget_files, file_ids)

    async def known_files(self, file_ids: Sequence[str]) -> set[str]:
        """Those of the ids that have a record, of any tenant; files with other ids are left over from a crash."""
        return await self._driver.read(files.known_files, file_ids)

    # Batches, as their owners see them.

    async def create_batch(self, batch: BatchRecord, *, defaults: Quotas = UNLIMITED) -> BatchRecord:
        """Add a batch and return it, or the batch made before with the same tenant and idempotency key.

        Raises `NotFound` if its input file is not there any more, and `QuotaExceeded` if too much is enqueued.
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
        """A page of the batches of a tenant, the newest first. `after` and `NotFound`: as for `files`."""
        return await self._driver.read(batches.batches, tenant, limit=limit, after=after, simple=simple, status=status)

    async def request_cancel(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Set the ending of a batch that is validating or in progress, and has none, and move it to `cancelling`.

        Returns the batch as it is then; None if there is no such batch.
        """
        return await self._driver.write(batches.request_cancel, tenant, batch_id)

    async def set_paused(self, tenant: str, batch_id: str, paused: bool) -> BatchRecord | None:
        """Pause or resume a batch. Lines of a paused batch are not claimed; its claimed lines and its time go on.

        Nothing changes once it has an ending. Returns the batch as it is then; None if there is no such batch.
        """
        return await self._driver.write(batches.set_paused, tenant, batch_id, paused)

    async def retry_batch(
        self, tenant: str, batch_id: str, batch: BatchRecord, *, defaults: Quotas = UNLIMITED
    ) -> BatchRecord:
        """Make `batch`, in progress, from the lines of an ended batch that did not succeed; line numbers stay.

        Sets the input file, the parent, the status and the counts of `batch`, and its model if that is None. The lines
        of the new batch are copies, which stay when those of the old batch are removed. An idempotency key is honoured
        as in `create_batch`. Raises `NotFound` for the old batch or its input file, `Conflict` if it has not ended, has
        no such lines or they were removed, and `QuotaExceeded` as `create_batch`.
        """
        return await self._driver.write(batches.retry_batch, tenant, batch_id, batch, defaults)

    async def results(self, tenant: str, batch_id: str, *, after: int, limit: int) -> list[StoredLine] | None:
        """A page of the finished lines with `sequence` > `after`, in the order in which they were committed.

        At most `limit`, and fewer if they are large; an empty page is the last one. No line appears later at a place
        that was passed before. None if there is no such batch. Raises `NotFound` if the results were removed.
        """
        return await self._driver.read(batches.results, tenant, batch_id, after=after, limit=limit)

    async def count_batches(self, tenant: str | None = None, *, simple: bool | None = None) -> dict[BatchStatus, int]:
        """Number of batches by status. `tenant` None: of all tenants. `simple` None: of both kinds."""
        return await self._driver.read(batches.count_batches, tenant, simple=simple)

    async def count_lines(self) -> dict[str, int]:
        """Numbers of `pending`, `suspect` and `claimed` lines of all batches in progress, paused or not."""
        return await self._driver.read(workers.count_lines)

    # Batches, as workers see them. A worker is a process that holds a lease.

    async def register_worker(
        self, name: str, lease: float, process: str | None = None, *, former: str | None = None
    ) -> str:
        """Add a worker, whose lease runs out `lease` seconds from now, and return its id. `name` is for people to read.

        `process`, for `processes`: a text from which others can tell whether its process has ended. `former`: the
        worker that this process was until its lease ran out; its lines are no longer suspects for that reason.
        """
        return await self._driver.write(workers.register_worker, name, lease, process, former)

    async def processes(self) -> dict[str, str]:
        """The `process` of each worker that was registered with one, by the id of the worker."""
        return await self._driver.read(workers.processes)

    async def renew_lease(self, worker: str, lease: float) -> bool:
        """Renew a lease; False if it ran out: then the worker has lost its claims, and must register again."""
        return await self._driver.write(workers.renew_lease, worker, lease)

    async def retire_worker(self, worker: str) -> int:
        """Remove a worker and give back all that it holds. Returns the number of lines."""
        return await self._driver.write(workers.retire_worker, worker)

    async def worker_died(self, worker: str, *, max_crashes: int = MAX_CRASHES) -> int:
        """Remove a worker whose process has ended, and make its lines suspects. Returns the number of lines.

        A line that was in work alone, and was in work at `max_crashes` such deaths, is to fail.
        """
        return await self._driver.write(workers.worker_died, worker, max_crashes)

    async def reap(self, *, max_crashes: int = MAX_CRASHES) -> int:
        """Do as `worker_died` for all workers whose leases ran out. Returns the number of lines."""
        return await self._driver.write(workers.reap, max_crashes)

    async def take_validation(self, worker: str) -> BatchRecord | None:
        """Take the oldest batch to validate that no other worker has. Lines that an earlier try added are removed.

        A worker validates one batch at a time: a batch that it took and neither began nor rejected is given again.
        None if there is none. Raises `LeaseLost`.
        """
        return await self._driver.write(batches.take_validation, worker)

    async def add_lines(self, worker: str, batch_id: str, lines: Sequence[NewLine]) -> bool:
        """Add lines. False, and nothing is added, if the batch is not this worker's any more, or has an ending."""
        return await self._driver.write(batches.add_lines, worker, batch_id, lines)

    async def begin(self, worker: str, batch_id: str, *, total: int, model: str | None) -> bool:
        """Move a batch of `total` lines from validating to in_progress, or to finalizing if `total` is 0.

        False as in `add_lines`.
        """
        return await self._driver.write(batches.begin, worker, batch_id, total=total, model=model)

    async def reject(self, worker: str, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
        """Move a batch from validating to failed, announce it, and remove its lines. False as in `add_lines`."""
        return await self._driver.write(batches.reject, worker, batch_id, problems)

    async def claim(self, worker: str, limit: int) -> list[ClaimedLine]:
        """Claim at most `limit` lines, in the turns of the tenants that have any (`limiting/shares.py`). Lines of one
        tenant come from the batches that expire first, by number within a batch.

        Suspects go to a worker that holds nothing else, as many at once as `policies/suspects.py` says, and it gets no
        other lines until they are done. A worker may get nothing although there are lines, so that it can take suspects
        once it holds nothing. Lines that are `given_up` come with any others. Raises `LeaseLost`.
        """
        return await self._driver.write(workers.claim, worker, limit)

    async def release(self, worker: str, lines: Sequence[ClaimedLine]) -> None:
        """Give claimed lines back uncomputed. Lines that are not this worker's any more do not change."""
        await self._driver.write(workers.release, worker, lines)

    async def commit(self, worker: str, results: Sequence[LineResult]) -> list[bool]:
        """Store results whose lines are still at the same attempt, in batches without an ending.

        Returns for each result whether it was taken. A result that was taken before is taken again, but not counted
        again, so a call may be repeated. In the same transaction the counts and the usage of the batch rise, and a
        batch whose lines are all finished goes to `finalizing`. Raises `LeaseLost`, and then no result is taken.
        """
        return await self._driver.write(workers.commit, worker, results)

    async def expire_batches(self) -> list[str]:
        """Set the ending of batches, in progress or validating, whose time is over. Returns their ids."""
        return await self._driver.write(batches.expire_batches)

    async def ending_among(self, batch_ids: Sequence[str]) -> set[str]:
        """Those of the batches that have an ending or are gone, whose lines need not be computed any further."""
        return await self._driver.read(batches.ending_among, batch_ids)

    async def take_finishing(self, worker: str) -> BatchRecord | None:
        """Take a batch with an ending, to build its files, that no other worker has. None if there is none.

        A worker finishes one batch at a time: a batch that it took and did not finish is given again. Raises
        `LeaseLost`.
        """
        return await self._driver.write(batches.take_finishing, worker)

    async def lines(self, batch_id: str, *, after: int, limit: int) -> list[StoredLine]:
        """A page of the lines with `number` > `after`, by number, to build files from; empty if they were removed."""
        return await self._driver.read(batches.lines, batch_id, after=after, limit=limit)

    async def finish(
        self, worker: str, batch_id: str, *, output: FileRecord | None, errors: FileRecord | None, unfinished: int
    ) -> bool:
        """Give a batch its files and final status, and announce its end. False if it is not this worker's any more.

        `unfinished`: the number of lines without a result, which count as failed from now on.
        """
        return await self._driver.write(
            batches.finish, worker, batch_id, output=output, errors=errors, unfinished=unfinished
        )

    async def remove_lines(self, limit: int, *, age: float) -> bool:
        """Remove at most `limit` rows of lines and results that batches no longer have, and fewer if they are large.

        Batches that ended without a file lose their lines when their output would have expired: `age` seconds after
        the end, unless they say otherwise. Returns whether there may be more to remove.
        """
        return await self._driver.write(batches.remove_lines, limit, age=age)

    # Shares of tenants.

    async def set_tenant_weight(self, tenant: str, weight: float) -> None:
        """Set the share of the capacity of a tenant, 0.01 to 1000, by default 1. Raises `InvalidRequest` for others."""
        await self._driver.write(quotas.set_tenant_weight, tenant, weight)

    async def tenant_weights(self) -> dict[str, float]:
        """Weights of tenants, by tenant, that are not 1."""
        return await self._driver.read(quotas.tenant_weights)

    # Webhooks and the outbox.

    async def add_webhook(self, webhook: Webhook) -> None:
        await self._driver.write(outbox.add_webhook, webhook)

    async def webhooks(self, tenant: str) -> list[Webhook]:
        return await self._driver.read(outbox.webhooks, tenant)

    async def update_webhook(self, webhook: Webhook) -> bool:
        """Replace the webhook with the same id and tenant; False if there is none.

        Messages on their way to it go to the new URL, or are given up if it is turned off.
        """
        return await self._driver.write(outbox.update_webhook, webhook)

    async def delete_webhook(self, tenant: str, webhook_id: str) -> bool:
        """Delete a webhook, and give up the messages on their way to it. False if there is no such webhook."""
        return await self._driver.write(outbox.delete_webhook, tenant, webhook_id)

    async def tenant_secrets(self, tenant: str, new: str) -> tuple[str, ...]:
        """The secrets that sign callbacks of this tenant, the newest first; it gets `new` if it has none yet."""
        return await self._driver.write(outbox.tenant_secrets, tenant, new)

    async def rotate_tenant_secret(self, tenant: str, new: str) -> None:
        """Make `new` the newest secret of callbacks of a tenant. Only the secret that was the newest so far is kept."""
        await self._driver.write(outbox.rotate_tenant_secret, tenant, new)

    async def take_deliveries(self, worker: str, limit: int) -> list[Delivery]:
        """Take messages that are due and that no other worker delivers, the oldest first.

        Each counts as a try, unless the worker is removed before it reports the outcome. Raises `LeaseLost`.
        """
        return await self._driver.write(outbox.take_deliveries, worker, limit)

    async def delivered(self, worker: str, delivery_id: str) -> bool:
        """Remove a message that arrived from the outbox. False if it is not this worker's any more."""
        return await self._driver.write(outbox.delivered, worker, delivery_id)

    async def put_off(self, worker: str, delivery_id: str, *, until: float | None, reason: str) -> bool:
        """Try a failed message again at `until`, or give it up (None). False if it is not this worker's any more."""
        return await self._driver.write(outbox.put_off, worker, delivery_id, until=until, reason=reason)

    async def failed_deliveries(self, tenant: str, limit: int) -> list[tuple[Delivery, str]]:
        """Messages that were given up, the newest first, with the reasons."""
        return await self._driver.read(outbox.failed_deliveries, tenant, limit)

    async def count_deliveries(self) -> dict[str, int]:
        """Numbers of `pending` and `failed` messages, for the metrics."""
        return await self._driver.read(outbox.count_deliveries)

    # Keys.

    async def add_key(self, key: ApiKey, digest: bytes) -> None:
        """Add a key, the SHA-256 of whose secret is `digest`."""
        await self._driver.write(keys.add_key, key, digest)

    async def key(self, digest: bytes) -> ApiKey | None:
        """The key whose secret has this digest; None if there is none, or it is revoked or expired.

        The secret from before the last rotation counts until its time is over, which `expires_at` then says.
        """
        return await self._driver.read(keys.key, digest)

    async def any_key(self) -> bool:
        """Whether a key was ever given out, revoked and expired keys included."""
        return await self._driver.read(keys.any_key)

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Keys of a tenant, or of all tenants (None), the newest first, revoked keys included."""
        return await self._driver.read(keys.keys, tenant)

    async def update_key(self, key_id: str, changes: Mapping[str, Any]) -> ApiKey | None:
        """Replace fields of a key by name: `name`, `expires_at`, `scopes`, `weight`, `best_priority`, `quotas`.

        `quotas` replaces single quotas by name; a quota of None is no limit any more. Returns the key as it is then;
        None if there is no such key.
        """
        return await self._driver.write(keys.update_key, key_id, changes)

    async def rotate_key(self, key_id: str, digest: bytes, prefix: str, overlap: float) -> ApiKey | None:
        """Give a key another secret. The previous secret works for `overlap` seconds more, older ones no longer.

        Returns the key as it is then; None if there is no such key, or it is revoked.
        """
        return await self._driver.write(keys.rotate_key, key_id, digest, prefix, overlap)

    async def note_key_uses(self, used_at: Mapping[str, float]) -> None:
        """Note when keys were last used, by key id. A time earlier than the one noted before changes nothing."""
        await self._driver.write(keys.note_key_uses, used_at)

    async def revoke_key(self, key_id: str) -> bool:
        """Revoke a key, which stays listed with the time of its first revocation. False if there is no such key."""
        return await self._driver.write(keys.revoke_key, key_id)

    # Marks by which the store and the folder with its files recognize each other: see `service/files/custody.py`.

    async def identity(self) -> StoreIdentity | None:
        """The identity of the store; None if it was never used with a folder of files."""
        return await self._driver.read(files.identity)

    async def set_identity(self, old: StoreIdentity | None, new: StoreIdentity) -> bool:
        """Replace the identity `old` by `new`. False, and nothing changes, if it is not `old`."""
        return await self._driver.write(files.set_identity, old, new)

    async def a_live_file(self) -> str | None:
        """The id of any file that is neither deleted nor expired; None if there is none."""
        return await self._driver.read(files.a_live_file)

    async def verify(self) -> None:
        """Raise `StoreUnavailable` if the records of files are damaged, as far as the database can tell.

        Takes time in proportion to the number of files. Called before files are removed.
        """
        await self._driver.verify()

    # Quotas.

    async def tenant_quotas(self) -> dict[str, Quotas]:
        """Quotas of the tenants that have any of their own, by tenant."""
        return await self._driver.read(quotas.tenant_quotas)

    async def set_tenant_quotas(self, tenant: str, limits: Quotas, weight: float | None = None) -> None:
        """Replace the quotas of a tenant; the default holds for those that `limits` lacks.

        `weight`: set as by `set_tenant_weight`, in the same transaction; None: it stays.
        """
        await self._driver.write(quotas.set_tenant_quotas, tenant, limits, weight)

    async def quota_use(self, tenant: str, key_id: str | None = None) -> QuotaUse:
        """Amounts that a tenant, or one of its keys, uses of what the store holds."""
        return await self._driver.read(quotas.quota_use, tenant, key_id)

    async def kept_quotas(self, defaults: Quotas) -> list[tuple[str, int, int]]:
        """Limits on what the store keeps: a name such as `tenant:a/storage_bytes`, the limit, and the amount used."""
        return await self._driver.read(quotas.kept_quotas, defaults)

    async def share_rates(
        self, changes: Sequence[Change], rates: Sequence[str], *, oldest: int, since: int
    ) -> tuple[float, list[Change]]:
        """Add `changes` to the counters that all processes share, and read them: those of `rates` from slot `oldest`
        on, all others from slot `since` on. Of two calls with changes at once, the later one sees the changes of both.

        Returns the counters after the time of the store, by which all processes count.
        """
        if not changes:
            return await self._driver.read(quotas.read_rates, rates, oldest, since)
        return await self._driver.write(quotas.share_rates, changes, rates, oldest, since)

    async def publish(self, worker: str, snapshot: str) -> list[Peer]:
        """Publish a snapshot of a process, which holds for as long as its worker has a lease, and return all `peers`.

        Of two processes that publish at once only the later one sees both.
        """
        return await self._driver.write(workers.publish, worker, snapshot)

    async def peers(self) -> list[Peer]:
        """All processes whose leases hold, by name."""
        return await self._driver.read(workers.peers)

    async def check(self) -> None:
        """Raise `StoreUnavailable` if the database does not answer a write, for `/ready`."""
        await self._driver.check(workers.check)

    async def close(self) -> None:
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
