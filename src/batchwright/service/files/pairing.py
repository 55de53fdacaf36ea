"""Whether a database and a folder of files belong together. Decided without I/O.

Both have the id of the store. It is the same in copies and backups, so both also have a *mark*, which every process of
the store replaces at its start and every ten minutes after: first in the database (`next_mark`), then in the folder,
then in the database again. A database whose mark is not the folder's was copied, or restored from a backup, or the
folder was. Its records may be older than the files, so it serves, but what they say is dead is not removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchwright.store.records import StoreIdentity

NO_MARK = ""
"""Mark of a store that was not yet seen together with a folder."""

Relation: TypeAlias = Literal[
    "current", "estranged", "new", "known", "foreign", "strange", "missing", "taken", "elsewhere"
]
"""Relation of a database to a folder of files:

- `current`: it is the database that the folder was last used with;
- `estranged`: it is the same store at another time, or a copy of it;
- `new`: neither has anything that could be lost;
- `known`: they have no id in common yet, but the database knows files of the folder: by their names, which are random;
- `foreign`: each is another store's, whether the folder has files or not;
- `strange`: the folder has files, none of which the database knows;
- `missing`: the database has records of files, and the folder has no file;
- `taken`: the folder is that of a store, without files yet, and the database has no id;
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
    """State of a database, and what it knows of the files of that folder."""

    identity: StoreIdentity | None = None
    names_files: bool = False
    """Whether it has a record of a file that is neither deleted nor expired."""
    knows_files: bool = False
    """Whether it has a record of a file in the folder."""

    @property
    def store_id(self) -> str | None:
        """Id of the store; None: it was given none yet."""
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
    """Return whether the folder's mark is the database's, or the one that was being written when its process ended."""
    return mark is not None and mark in (identity.mark, identity.next_mark)
