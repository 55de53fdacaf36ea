"""Operations on workers and their leases."""

from __future__ import annotations

import secrets

from batchwright.errors import LeaseLost
from batchwright.policies.suspects import MAX_CRASHES
from batchwright.store.operations.crashed_lines import clear_suspects_of, suspect_lines_of
from batchwright.store.records import Peer
from batchwright.store.transaction import Tx


def register_worker(tx: Tx, name: str, lease: float, process: str | None = None, *, former: str | None = None) -> str:
    """Return the id of a new worker, whose lease runs out `lease` seconds from now. `name` is for people to read.

    `process` is for `processes`: what others can tell from whether its process has ended. `former`: the worker that
    this process was until its lease ran out. Nobody suspects its lines on that account any longer.
    """
    if former is not None:
        retire_worker(tx, former)
        clear_suspects_of(tx, former)
    worker = f"wrk_{secrets.token_hex(12)}"
    tx.run("add_worker", id=worker, name=name, expires_at=tx.now + lease, process=process)
    return worker


def processes(tx: Tx) -> dict[str, str]:
    """Return what workers said of their processes, by their ids; without those that said nothing."""
    return dict(tx.rows("processes"))


def renew_lease(tx: Tx, worker: str, lease: float) -> bool:
    """Renew a lease. False: it had run out; what it claimed is lost to it, and it must register again."""
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
    """Publish figures of this process to the others, for as long as it renews the lease of its worker; see `peers`.

    Of two that publish at once only the later one sees both.
    """
    tx.rows("lock_exchange")
    tx.run("publish", worker=worker, snapshot=snapshot, now=tx.now)
    return peers(tx)


def peers(tx: Tx) -> list[Peer]:
    """Return all processes whose leases hold, by name."""
    return [Peer(*row) for row in tx.rows("snapshots", now=tx.now)]


def retire_worker(tx: Tx, worker: str) -> int:
    """Give back at once all that a worker holds. Returns the number of lines."""
    tx.run("remove_worker", worker=worker)
    tx.run("free_batches_of_worker", worker=worker)
    tx.run("free_deliveries_of_worker", worker=worker)
    tx.run("leave_suspects", worker=worker)
    return tx.run("free_lines_of_worker", worker=worker)


def worker_died(tx: Tx, worker: str, *, max_crashes: int = MAX_CRASHES) -> int:
    """Take what a worker whose process has ended holds; its lines become suspects. Returns the number of lines.

    A line that was in work alone, and has been in work at `max_crashes` such deaths, is to fail.
    """
    if tx.row("lock_worker", worker=worker) is None:
        return 0
    suspects = suspect_lines_of(tx, worker, max_crashes)
    return suspects + retire_worker(tx, worker)


def reap(tx: Tx, *, max_crashes: int = MAX_CRASHES) -> int:
    """Take what workers whose lease ran out hold, as `worker_died` does. Returns the number of lines."""
    lines = sum(worker_died(tx, worker, max_crashes=max_crashes) for (worker,) in tx.rows("dead_workers", now=tx.now))
    tx.run("forget_crashes")
    return lines


def check(tx: Tx) -> None:
    tx.run("check", now=tx.now)
