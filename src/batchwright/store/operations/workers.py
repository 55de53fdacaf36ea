"""Operations on workers and their leases."""

from __future__ import annotations

import secrets

from batchwright.errors import LeaseLost
from batchwright.store.operations.crashed_lines import clear_suspects_of, suspect_lines_of
from batchwright.store.records import Peer
from batchwright.store.transaction import Tx


def register_worker(tx: Tx, name: str, lease: float, process: str | None, former: str | None) -> str:
    if former is not None:
        retire_worker(tx, former)
        clear_suspects_of(tx, former)
    worker = f"wrk_{secrets.token_hex(12)}"
    tx.run("add_worker", id=worker, name=name, expires_at=tx.now + lease, process=process)
    return worker


def processes(tx: Tx) -> dict[str, str]:
    return dict(tx.rows("processes"))


def renew_lease(tx: Tx, worker: str, lease: float) -> bool:
    return tx.run("renew_lease", worker=worker, expires_at=tx.now + lease, now=tx.now) == 1


def require_lease(tx: Tx, worker: str) -> int | None:
    """Return the crash whose suspects this worker computes; until the transaction ends nothing takes from it what it
    holds. Raises `LeaseLost`.
    """
    row = tx.row("lease", worker=worker)
    if row is None or row[0] <= tx.now:
        raise LeaseLost(f"the lease of worker {worker} has run out: register again")
    trying: int | None = row[1]
    return trying


def publish(tx: Tx, worker: str, snapshot: str) -> list[Peer]:
    tx.rows("lock_exchange")
    tx.run("publish", worker=worker, snapshot=snapshot, now=tx.now)
    return peers(tx)


def peers(tx: Tx) -> list[Peer]:
    return [Peer(*row) for row in tx.rows("snapshots", now=tx.now)]


def retire_worker(tx: Tx, worker: str) -> int:
    tx.run("remove_worker", worker=worker)
    tx.run("free_batches_of_worker", worker=worker)
    tx.run("free_deliveries_of_worker", worker=worker)
    tx.run("leave_suspects", worker=worker)
    return tx.run("free_lines_of_worker", worker=worker)


def worker_died(tx: Tx, worker: str, max_crashes: int) -> int:
    if tx.row("lock_worker", worker=worker) is None:
        return 0
    suspects = suspect_lines_of(tx, worker, max_crashes)
    return suspects + retire_worker(tx, worker)


def reap(tx: Tx, max_crashes: int) -> int:
    lines = sum(worker_died(tx, worker, max_crashes) for (worker,) in tx.rows("dead_workers", now=tx.now))
    tx.run("forget_crashes")
    return lines


def check(tx: Tx) -> None:
    tx.run("check", now=tx.now)
