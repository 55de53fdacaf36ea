"""The store over a driver: which operation each method is, and whether it reads or writes."""

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
    identity,
    keys,
    outbox,
    quotas,
    removal,
    stages,
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


class SqlStore:
    """A `Store` in an SQL database. Its methods are described there."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def add_file(self, file: FileRecord, *, defaults: Quotas = UNLIMITED) -> None:
        await self._driver.write(files.add_file, file, defaults)

    async def file(self, tenant: str, file_id: str) -> FileRecord | None:
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
        return await self._driver.read(files.files, tenant, limit=limit, purpose=purpose, order=order, after=after)

    async def delete_file(self, tenant: str, file_id: str) -> bool:
        return await self._driver.write(files.delete_file, tenant, file_id)

    async def take_dead_files(self, limit: int) -> list[str]:
        return await self._driver.read(files.take_dead_files, limit)

    async def forget_files(self, file_ids: Sequence[str]) -> None:
        await self._driver.write(removal.forget_files, file_ids)

    async def known_files(self, file_ids: Sequence[str]) -> set[str]:
        return await self._driver.read(files.known_files, file_ids)

    async def create_batch(self, batch: BatchRecord, *, defaults: Quotas = UNLIMITED) -> BatchRecord:
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
        return await self._driver.read(batches.batches, tenant, limit=limit, after=after, simple=simple, status=status)

    async def request_cancel(self, tenant: str, batch_id: str) -> BatchRecord | None:
        return await self._driver.write(batches.request_cancel, tenant, batch_id)

    async def set_paused(self, tenant: str, batch_id: str, paused: bool) -> BatchRecord | None:
        return await self._driver.write(batches.set_paused, tenant, batch_id, paused)

    async def retry_batch(
        self, tenant: str, batch_id: str, batch: BatchRecord, *, defaults: Quotas = UNLIMITED
    ) -> BatchRecord:
        return await self._driver.write(batches.retry_batch, tenant, batch_id, batch, defaults)

    async def results(self, tenant: str, batch_id: str, *, after: int, limit: int) -> list[StoredLine] | None:
        return await self._driver.read(batches.results, tenant, batch_id, after=after, limit=limit)

    async def count_batches(self, tenant: str | None = None, *, simple: bool | None = None) -> dict[BatchStatus, int]:
        return await self._driver.read(batches.count_batches, tenant, simple=simple)

    async def count_lines(self) -> dict[str, int]:
        return await self._driver.read(claims.count_lines)

    async def register_worker(
        self, name: str, lease: float, process: str | None = None, *, former: str | None = None
    ) -> str:
        return await self._driver.write(workers.register_worker, name, lease, process, former)

    async def processes(self) -> dict[str, str]:
        return await self._driver.read(workers.processes)

    async def renew_lease(self, worker: str, lease: float) -> bool:
        return await self._driver.write(workers.renew_lease, worker, lease)

    async def retire_worker(self, worker: str) -> int:
        return await self._driver.write(workers.retire_worker, worker)

    async def worker_died(self, worker: str, *, max_crashes: int = MAX_CRASHES) -> int:
        return await self._driver.write(workers.worker_died, worker, max_crashes)

    async def reap(self, *, max_crashes: int = MAX_CRASHES) -> int:
        return await self._driver.write(workers.reap, max_crashes)

    async def set_tenant_weight(self, tenant: str, weight: float) -> None:
        await self._driver.write(fair_claims.set_tenant_weight, tenant, weight)

    async def tenant_weights(self) -> dict[str, float]:
        return await self._driver.read(fair_claims.tenant_weights)

    async def take_validation(self, worker: str) -> BatchRecord | None:
        return await self._driver.write(stages.take_validation, worker)

    async def add_lines(self, worker: str, batch_id: str, lines: Sequence[NewLine]) -> bool:
        return await self._driver.write(stages.add_lines, worker, batch_id, lines)

    async def begin(self, worker: str, batch_id: str, *, total: int, model: str | None) -> bool:
        return await self._driver.write(stages.begin, worker, batch_id, total=total, model=model)

    async def reject(self, worker: str, batch_id: str, problems: Sequence[BatchProblem]) -> bool:
        return await self._driver.write(stages.reject, worker, batch_id, problems)

    async def claim(self, worker: str, limit: int) -> list[ClaimedLine]:
        return await self._driver.write(claims.claim, worker, limit)

    async def release(self, worker: str, lines: Sequence[ClaimedLine]) -> None:
        await self._driver.write(claims.release, worker, lines)

    async def commit(self, worker: str, results: Sequence[LineResult]) -> list[bool]:
        return await self._driver.write(claims.commit, worker, results)

    async def expire_batches(self) -> list[str]:
        return await self._driver.write(stages.expire_batches)

    async def ending_among(self, batch_ids: Sequence[str]) -> set[str]:
        return await self._driver.read(batches.ending_among, batch_ids)

    async def remove_lines(self, limit: int, *, age: float) -> bool:
        return await self._driver.write(removal.remove_lines, limit, age=age)

    async def take_finishing(self, worker: str) -> BatchRecord | None:
        return await self._driver.write(stages.take_finishing, worker)

    async def lines(self, batch_id: str, *, after: int, limit: int) -> list[StoredLine]:
        return await self._driver.read(claims.lines, batch_id, after=after, limit=limit)

    async def finish(
        self, worker: str, batch_id: str, *, output: FileRecord | None, errors: FileRecord | None, unfinished: int
    ) -> bool:
        return await self._driver.write(
            stages.finish, worker, batch_id, output=output, errors=errors, unfinished=unfinished
        )

    async def add_webhook(self, webhook: Webhook) -> None:
        await self._driver.write(outbox.add_webhook, webhook)

    async def webhooks(self, tenant: str) -> list[Webhook]:
        return await self._driver.read(outbox.webhooks, tenant)

    async def update_webhook(self, webhook: Webhook) -> bool:
        return await self._driver.write(outbox.update_webhook, webhook)

    async def delete_webhook(self, tenant: str, webhook_id: str) -> bool:
        return await self._driver.write(outbox.delete_webhook, tenant, webhook_id)

    async def tenant_secrets(self, tenant: str, new: str) -> tuple[str, ...]:
        return await self._driver.write(outbox.tenant_secrets, tenant, new)

    async def rotate_tenant_secret(self, tenant: str, new: str) -> None:
        await self._driver.write(outbox.rotate_tenant_secret, tenant, new)

    async def take_deliveries(self, worker: str, limit: int) -> list[Delivery]:
        return await self._driver.write(outbox.take_deliveries, worker, limit)

    async def delivered(self, worker: str, delivery_id: str) -> bool:
        return await self._driver.write(outbox.delivered, worker, delivery_id)

    async def put_off(self, worker: str, delivery_id: str, *, until: float | None, reason: str) -> bool:
        return await self._driver.write(outbox.put_off, worker, delivery_id, until=until, reason=reason)

    async def failed_deliveries(self, tenant: str, limit: int) -> list[tuple[Delivery, str]]:
        return await self._driver.read(outbox.failed_deliveries, tenant, limit)

    async def count_deliveries(self) -> dict[str, int]:
        return await self._driver.read(outbox.count_deliveries)

    async def add_key(self, key: ApiKey, digest: bytes) -> None:
        await self._driver.write(keys.add_key, key, digest)

    async def key(self, digest: bytes) -> ApiKey | None:
        return await self._driver.read(keys.key, digest)

    async def any_key(self) -> bool:
        return await self._driver.read(keys.any_key)

    async def keys(self, tenant: str | None = None) -> list[ApiKey]:
        return await self._driver.read(keys.keys, tenant)

    async def update_key(self, key_id: str, changes: Mapping[str, Any]) -> ApiKey | None:
        return await self._driver.write(keys.update_key, key_id, changes)

    async def rotate_key(self, key_id: str, digest: bytes, prefix: str, overlap: float) -> ApiKey | None:
        return await self._driver.write(keys.rotate_key, key_id, digest, prefix, overlap)

    async def note_key_uses(self, used_at: Mapping[str, float]) -> None:
        await self._driver.write(keys.note_key_uses, used_at)

    async def revoke_key(self, key_id: str) -> bool:
        return await self._driver.write(keys.revoke_key, key_id)

    async def identity(self) -> StoreIdentity | None:
        return await self._driver.read(identity.identity)

    async def set_identity(self, old: StoreIdentity | None, new: StoreIdentity) -> bool:
        return await self._driver.write(identity.set_identity, old, new)

    async def a_live_file(self) -> str | None:
        return await self._driver.read(identity.a_live_file)

    async def tenant_quotas(self) -> dict[str, Quotas]:
        return await self._driver.read(quotas.tenant_quotas)

    async def set_tenant_quotas(self, tenant: str, limits: Quotas, weight: float | None = None) -> None:
        await self._driver.write(quotas.set_tenant_quotas, tenant, limits, weight)

    async def quota_use(self, tenant: str, key_id: str | None = None) -> QuotaUse:
        return await self._driver.read(quotas.quota_use, tenant, key_id)

    async def kept_quotas(self, defaults: Quotas) -> list[tuple[str, int, int]]:
        return await self._driver.read(quotas.kept_quotas, defaults)

    async def share_rates(
        self, changes: Sequence[Change], rates: Sequence[str], *, oldest: int, since: int
    ) -> tuple[float, list[Change]]:
        if not changes:
            return await self._driver.read(quotas.read_rates, rates, oldest, since)
        return await self._driver.write(quotas.share_rates, changes, rates, oldest, since)

    async def publish(self, worker: str, snapshot: str) -> list[Peer]:
        return await self._driver.write(workers.publish, worker, snapshot)

    async def peers(self) -> list[Peer]:
        return await self._driver.read(workers.peers)

    async def check(self) -> None:
        await self._driver.check(workers.check)

    async def verify(self) -> None:
        await self._driver.verify()

    async def close(self) -> None:
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
