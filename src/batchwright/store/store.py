"""The store of files, batches and lines, and its guarantees, which are the same for every database.

Every method is one transaction: when it returns, its changes survive a crash of the process and of the machine, and
when it raises, nothing has changed. Methods that read or change what belongs to a tenant take the tenant, and find
nothing of another tenant.

Every method raises `StoreUnavailable` when the database does not answer or its disk is full. In one such case
something may have changed nevertheless: when a connection to PostgreSQL is lost in COMMIT, and the server stays away
too long to be asked about the outcome. After `StoreUnavailable` a worker therefore retires and registers again, which
frees what it may hold unknowingly. Methods that add something raise `Conflict` when its id already exists. Texts with
lone surrogates, and in PostgreSQL those with NUL characters, raise `InvalidRequest`.

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

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, Self

from batchwright.limiting.rates import Change
from batchwright.store.operations import batches as batch_operations
from batchwright.store.operations import files as file_operations
from batchwright.store.operations import keys as key_operations
from batchwright.store.operations import outbox as outbox_operations
from batchwright.store.operations import quotas as quota_operations
from batchwright.store.operations import workers as worker_operations
from batchwright.store.transaction import Driver, P, R, Tx


def _write(operation: Callable[Concatenate[Tx, P], R]) -> Callable[Concatenate[Store, P], Coroutine[Any, Any, R]]:
    """Return the method of `Store` that does `operation` in a transaction, which is durable once it returns."""

    @wraps(operation)
    async def method(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.driver.write(operation, *args, **kwargs)

    return method


def _read(operation: Callable[Concatenate[Tx, P], R]) -> Callable[Concatenate[Store, P], Coroutine[Any, Any, R]]:
    """Return the method of `Store` that does `operation`, which changes nothing."""

    @wraps(operation)
    async def method(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.driver.read(operation, *args, **kwargs)

    return method


class Store:
    """Files, batches, lines, the outbox and keys. Made by `open_store`; used from one event loop.

    A method made from an operation takes its arguments, without the transaction, and does what its docstring says.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    # Records of files, whose bytes are stored by `service/files/blobs.py`.

    add_file = _write(file_operations.add_file)
    file = _read(file_operations.file)
    files = _read(file_operations.files)
    delete_file = _write(file_operations.delete_file)
    take_dead_files = _read(file_operations.take_dead_files)
    forget_files = _write(batch_operations.forget_files)
    known_files = _read(file_operations.known_files)

    # Batches, as their owners see them.

    create_batch = _write(batch_operations.create_batch)
    batch = _read(batch_operations.batch)
    batch_of_idempotency_key = _read(batch_operations.batch_of_idempotency_key)
    batches = _read(batch_operations.batches)
    request_cancel = _write(batch_operations.request_cancel)
    set_paused = _write(batch_operations.set_paused)
    retry_batch = _write(batch_operations.retry_batch)
    results = _read(batch_operations.results)
    count_batches = _read(batch_operations.count_batches)
    count_lines = _read(worker_operations.count_lines)

    # Batches, as workers see them. A worker is a process that holds a lease.

    register_worker = _write(worker_operations.register_worker)
    processes = _read(worker_operations.processes)
    renew_lease = _write(worker_operations.renew_lease)
    retire_worker = _write(worker_operations.retire_worker)
    worker_died = _write(worker_operations.worker_died)
    reap = _write(worker_operations.reap)
    take_validation = _write(batch_operations.take_validation)
    add_lines = _write(batch_operations.add_lines)
    begin = _write(batch_operations.begin)
    reject = _write(batch_operations.reject)
    claim = _write(worker_operations.claim)
    release = _write(worker_operations.release)
    commit = _write(worker_operations.commit)
    expire_batches = _write(batch_operations.expire_batches)
    ending_among = _read(batch_operations.ending_among)
    take_finishing = _write(batch_operations.take_finishing)
    lines = _read(batch_operations.lines)
    finish = _write(batch_operations.finish)
    remove_lines = _write(batch_operations.remove_lines)

    # Shares of tenants.

    set_tenant_weight = _write(quota_operations.set_tenant_weight)
    tenant_weights = _read(quota_operations.tenant_weights)

    # Webhooks and the outbox.

    add_webhook = _write(outbox_operations.add_webhook)
    webhooks = _read(outbox_operations.webhooks)
    update_webhook = _write(outbox_operations.update_webhook)
    rotate_webhook = _write(outbox_operations.rotate_webhook)
    delete_webhook = _write(outbox_operations.delete_webhook)
    tenant_secrets = _write(outbox_operations.tenant_secrets)
    rotate_tenant_secret = _write(outbox_operations.rotate_tenant_secret)
    take_deliveries = _write(outbox_operations.take_deliveries)
    delivered = _write(outbox_operations.delivered)
    put_off = _write(outbox_operations.put_off)
    postpone = _write(outbox_operations.postpone)
    failed_deliveries = _read(outbox_operations.failed_deliveries)
    forget_deliveries = _write(outbox_operations.forget_deliveries)
    count_deliveries = _read(outbox_operations.count_deliveries)

    # Keys.

    add_key = _write(key_operations.add_key)
    key = _read(key_operations.key)
    any_key = _read(key_operations.any_key)
    keys = _read(key_operations.keys)
    update_key = _write(key_operations.update_key)
    rotate_key = _write(key_operations.rotate_key)
    note_key_uses = _write(key_operations.note_key_uses)
    revoke_key = _write(key_operations.revoke_key)

    # Marks by which the store and the folder with its files recognize each other: see `service/files/custody.py`.

    identity = _read(file_operations.identity)
    set_identity = _write(file_operations.set_identity)
    a_live_file = _read(file_operations.a_live_file)

    async def verify(self) -> None:
        """Raise `StoreUnavailable` if the records of files are damaged, as far as the database can see.

        Takes time in proportion to the number of files. Called before files are removed.
        """
        await self.driver.verify()

    # Quotas.

    tenant_quotas = _read(quota_operations.tenant_quotas)
    set_tenant_quotas = _write(quota_operations.set_tenant_quotas)
    quota_use = _read(quota_operations.quota_use)
    kept_quotas = _read(quota_operations.kept_quotas)

    async def share_rates(
        self, changes: Sequence[Change], rates: Sequence[str], *, oldest: int, since: int
    ) -> tuple[float, list[Change]]:
        """Add `changes` to the counters that all processes share, and read them: those of `rates` from slot `oldest`
        on, all others from slot `since` on. If two calls add changes at once, the later one sees the changes of both.

        Returns the time of the store, by which all processes count, and the counters.
        """
        if not changes:
            return await self.driver.read(quota_operations.read_rates, rates, oldest, since)
        return await self.driver.write(quota_operations.share_rates, changes, rates, oldest, since)

    publish = _write(worker_operations.publish)
    peers = _read(worker_operations.peers)

    async def check(self) -> None:
        """Raise `StoreUnavailable` if the database does not answer a write, for `/ready`."""
        await self.driver.check(worker_operations.check)

    async def close(self) -> None:
        await self.driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
