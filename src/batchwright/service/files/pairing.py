"""Decision on whether a database and a folder of files belong together, without I/O.

Both have the id of the store. Copies and backups have the same id, so there is also a *mark*, which every process of
the store replaces when it starts and every ten minutes: first in the database (`next_mark`), then in the folder, then
in the database again. Where the marks differ, the database or the folder was copied, or restored from a backup. The
records may then be older than the files, so the service runs, but removes no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchwright.store.records import StoreIdentity

NO_MARK = ""
"""Mark of a store that has not been used with a folder yet."""

Relation: TypeAlias = Literal[
    "current", "estranged", "new", "known", "foreign", "strange", "missing", "taken", "elsewhere"
]
"""Relation of a database to a folder of files:

- `current`: the folder was last used with this database;
- `estranged`: the database is the same store at another time, or a copy of it;
- `new`: neither has anything that could be lost;
- `known`: one has no id yet, but the database has records of files in the folder, whose names are random;
- `foreign`: they belong to different stores, whether the folder has files or not;
- `strange`: the folder has files, and the database has records of none of them;
- `missing`: the database has records of files, and the folder has no files;
- `taken`: the folder belongs to a store and has no files yet, and the database has no id;
- `elsewhere`: neither has files, and the database is used with another folder.
"""


@dataclass(frozen=True, slots=True)
class FolderState:
    """State of a folder of files."""

    store_id: str | None = None
    mark: str | None = None
    has_files: bool = False


@dataclass(frozen=True, slots=True)
class DatabaseState:
    """State of a database, and whether it has records of files in a folder."""

    identity: StoreIdentity | None = None
    names_files: bool = False
    """Whether it has a record of a file that is neither deleted nor expired."""
    knows_files: bool = False
    """Whether it has a record of a file in the folder."""

    @property
    def store_id(self) -> str | None:
        """Id of the store; None: it has none yet."""
        return None if self.identity is None else self.identity.store_id


def relation(folder: FolderState, database: DatabaseState) -> Relation:
    """Return the relation of `database` to `folder`."""
    identity = database.identity
    if identity is not None and folder.store_id == identity.store_id:
        return "current" if is_current(folder.mark, identity) else "estranged"
    if folder.store_id is not None and identity is not None:
        return "foreign"
    if folder.has_files:
        return "known" if database.knows_files else "strange"
    if database.names_files:
        return "missing"
    if folder.store_id is not None:
        return "taken"
    return "new" if identity is None or identity.mark == NO_MARK else "elsewhere"


def is_current(mark: str | None, identity: StoreIdentity) -> bool:
    """Return whether a folder's mark is the database's, or the one that was being written when a process died."""
    return mark is not None and mark in (identity.mark, identity.next_mark)
