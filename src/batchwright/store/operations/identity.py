"""Operations on the identity by which the store and the folder with its files recognize each other."""

from __future__ import annotations

from dataclasses import asdict

from batchwright.store.records import StoreIdentity
from batchwright.store.transaction import Tx


def identity(tx: Tx) -> StoreIdentity | None:
    """Return the identity; None: the store was never used with a folder of files."""
    row = tx.row("identity")
    return StoreIdentity(*row) if row else None


def set_identity(tx: Tx, old: StoreIdentity | None, new: StoreIdentity) -> bool:
    """Put `new` in the place of `old`. False: `old` is not what is there, and nothing was changed."""
    if old is None:
        return tx.run("add_identity", **asdict(new)) == 1
    before = {f"old_{name}": value for name, value in asdict(old).items()}
    return tx.run("change_identity", **asdict(new), **before) == 1


def a_live_file(tx: Tx) -> str | None:
    """Return the id of some file that is neither deleted nor expired; None: there is none."""
    row = tx.row("a_live_file", now=tx.now)
    return row[0] if row else None
