"""Opening of a database together with its folder of files, and the link between them: the id and the mark that both
have (`pairing.py`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from batchwright.crash_points import crash_point
from batchwright.errors import StoreMismatch, StoreUnavailable
from batchwright.service.files.blobs import STORE_NOTE, Blobs, mark_recorded
from batchwright.service.files.durable import lock_file, replace_file
from batchwright.service.files.pairing import NO_MARK, DatabaseState, FolderState, Relation, is_current, relation
from batchwright.service.off_loop import off_loop
from batchwright.store import Store, open_store, shown_url, store_exists
from batchwright.store.records import StoreIdentity

_log = logging.getLogger(__name__)
_LOCK = "store.lock"
_LOCK_TRIES = 750
_BETWEEN_TRIES = 0.02
ESTRANGED = (
    "%s was last used with another state of its database: one of the two was copied, or restored from a backup. "
    "No file is removed until somebody says that they belong together: batchwright jobs adopt"
)
"""Log message about a folder; its argument is the folder."""
_ADOPT = "if they were put together on purpose: batchwright jobs adopt, with the same flags"
_MISMATCHES: Mapping[Relation, str] = {
    "foreign": "the database {database} is that of store {store}, and the files in {folder} are those of store "
    "{folder_store}: name the database of these files (--database) or the data folder of this database (--data); "
    f"{_ADOPT}",
    "strange": "the database {database} knows none of the files in {folder}: name the database of these files "
    f"(--database), or another data folder (--data), or move the files away to begin anew; {_ADOPT}",
    "missing": "the database {database} has records of files, and there is none in {folder}: name the data folder of "
    "this database (--data), mount it, or restore its files; to go on without them: batchwright jobs adopt, with the "
    "same flags",
    "taken": "{folder} is that of store {folder_store}, and the database {database} is new or of an earlier version: "
    "name the database of that store (--database), or another data folder (--data), or move {folder} away to begin "
    f"anew; {_ADOPT}",
    "elsewhere": "the database {database} is used with another data folder than that of {folder}: name that one "
    "(--data), or mount it; to go on with this one instead: batchwright jobs adopt, with the same flags",
}
"""Reasons for refusing a database and a folder, with the remedies."""


class _Note(msgspec.Struct):
    """Content of the file that says to which store a folder belongs."""

    store_id: str
    mark: str


class Custody:
    """Link of one store with its folder of files. Several processes may use the same one at once."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs

    async def join(self, database: str) -> None:
        """Check that the store and the folder belong together, and give both the same id if they have none yet.

        `database`: name of the store in messages. Raises `StoreMismatch` unless it is certain that they belong
        together.
        """
        async with self._alone():
            folder = await off_loop(_state_of, self._blobs)
            state = await self._database_state(folder)
            match relation(folder, state):
                case "current":
                    pass
                case "estranged":
                    _log.warning(ESTRANGED, self._blobs.folder)
                case "new":
                    await self._pair(state.identity, None)
                case "known":
                    await self._introduce(folder, state.identity)
                case mismatch:
                    names = {"store": state.store_id, "folder_store": folder.store_id}
                    message = _MISMATCHES[mismatch]
                    raise StoreMismatch(message.format(database=database, folder=self._blobs.folder, **names))

    async def check(self, database: str, *, inside: bool) -> None:
        """Do as `join`, for a process that needs only the store, whose files may be on another machine.

        `inside`: the database lies in the data folder, so the two are given one id if both are new.
        """
        if not inside and not self._blobs.folder.exists():
            return
        folder = await off_loop(_state_of, self._blobs)
        found = relation(folder, await self._database_state(folder))
        if found in ("missing", "elsewhere") or (found == "new" and not inside):
            return
        await self.join(database)

    async def adopt(self) -> tuple[int, int]:
        """Make the store and the folder belong together, whatever they were before, because an operator says so.

        Returns the number of files, and how many of them the store knows. The others count as those of another
        database, which may come back.
        """
        async with self._alone():
            known = total = 0
            for group in await off_loop(lambda: [*self._blobs.all_blobs()]):
                total += len(group)
                known += len(await self._store.known_files([path.name for path in group]))
            await off_loop(self._mark_all_recorded)
            await self._pair(await self._store.identity(), await off_loop(self._read_id))
        return total, known

    async def is_current(self) -> bool:
        """Return whether files without a record may be removed: the folder was last used with this store."""
        return _agree(await off_loop(_read, self._blobs), await self._store.identity())

    async def renew(self) -> bool:
        """Replace the mark, so that copies made until now differ from the store. Returns False if this is a copy."""
        async with self._alone():
            note, identity = await off_loop(_read, self._blobs), await self._store.identity()
            if note is None or identity is None or not _agree(note, identity):
                return False
            await self._write_mark(identity, StoreIdentity(identity.store_id, note.mark, _new_mark()))
            return True

    # State.

    async def _database_state(self, folder: FolderState) -> DatabaseState:
        identity = await self._store.identity()
        strangers = identity is None or folder.store_id != identity.store_id
        return DatabaseState(
            identity,
            names_files=strangers and await self._store.a_live_file() is not None,
            knows_files=strangers and await self._knows_files(),
        )

    async def _knows_files(self) -> bool:
        for group in await off_loop(lambda: [*self._blobs.all_blobs()]):
            if await self._store.known_files([path.name for path in group]):
                return True
        return False

    def _read_id(self) -> str | None:
        try:
            note = _read(self._blobs)
        except StoreMismatch:
            return None
        return None if note is None else note.store_id

    # Changes.

    async def _introduce(self, folder: FolderState, identity: StoreIdentity | None) -> None:
        """Give one id to a database and a folder of which at least one has none, but which have files in common."""
        await off_loop(self._mark_all_recorded)
        if (identity is None or identity.mark == NO_MARK) and folder.store_id is None:
            await self._pair(identity, None)
            return
        # One of the two dates from before they had an id, so it is older: they get the same id, and different marks.
        if identity is None:
            assert folder.store_id is not None
            await self._set(None, StoreIdentity(folder.store_id, _new_mark()))
        else:
            await off_loop(self._write, _Note(identity.store_id, _new_mark()))
        _log.warning(ESTRANGED, self._blobs.folder)

    async def _pair(self, identity: StoreIdentity | None, folder_id: str | None) -> None:
        """Give the store and the folder the same id and mark."""
        if identity is None:
            identity = StoreIdentity(folder_id or secrets.token_hex(8), NO_MARK, _new_mark())
            await self._set(None, identity)
        await self._write_mark(identity, StoreIdentity(identity.store_id, identity.mark, _new_mark()))

    async def _write_mark(self, old: StoreIdentity, new: StoreIdentity) -> None:
        """Write the mark to the store, the folder and the store again, so that the store always has the folder's."""
        assert new.next_mark is not None
        await self._set(old, new)
        await off_loop(self._write, _Note(new.store_id, new.next_mark))
        await self._set(new, StoreIdentity(new.store_id, new.next_mark))

    async def _set(self, old: StoreIdentity | None, new: StoreIdentity) -> None:
        if not await self._store.set_identity(old, new):
            raise StoreUnavailable(
                "another process uses this database with another data folder: all processes of a store need the same "
                "--data"
            )

    def _write(self, note: _Note) -> None:
        crash_point("custody.before_mark")
        replace_file(self._blobs.folder / STORE_NOTE, msgspec.json.encode(note))
        crash_point("custody.after_mark")

    def _mark_all_recorded(self) -> None:
        """Mark all files as recorded, since any of them may have a record in a database that is not here."""
        for group in self._blobs.all_blobs():
            for path in group:
                mark_recorded(path)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Lock the mark against other processes. Raises `StoreUnavailable` when one holds it for too long."""
        file = await off_loop(lock_file, self._blobs.folder / _LOCK)
        with file:
            for _ in range(_LOCK_TRIES):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_BETWEEN_TRIES)
            else:
                raise StoreUnavailable(f"another process holds {self._blobs.folder / _LOCK} for too long: end it")
            yield


def _state_of(blobs: Blobs) -> FolderState:
    note = _read(blobs)
    has_files = next(blobs.all_blobs(), None) is not None
    return FolderState(has_files=has_files) if note is None else FolderState(note.store_id, note.mark, has_files)


def _read(blobs: Blobs) -> _Note | None:
    """Return the note in the folder; None: there is none. Raises `StoreMismatch` when it cannot be read."""
    path = blobs.folder / STORE_NOTE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Note)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise StoreMismatch(
            f"{path} cannot be read ({error}), so it is not known which database the files belong to: restore it "
            f"from a backup; {_ADOPT}"
        ) from error


def _agree(note: _Note | None, identity: StoreIdentity | None) -> bool:
    if note is None or identity is None:
        return False
    return note.store_id == identity.store_id and is_current(note.mark, identity)


def _new_mark() -> str:
    return secrets.token_hex(8)


_FILES = "files"
_DATABASE = "batchwright.db"


def database_of(database: str | None, data: Path) -> str:
    """Return the address of the database: `database`, or else a file in the data folder."""
    return database or str(data / _DATABASE)


def blobs_of(data: Path) -> Blobs:
    """Return the files in a data folder."""
    return Blobs(data / _FILES)


def require_database(database: str, data: Path) -> bool:
    """Return whether there is a store at `database`; False: one may be made, since the data folder belongs to none.

    Blocks, and makes nothing. Raises what `store_exists` raises, and `StoreMismatch` when there is no store and the
    folder is used: a new one would know none of its files, and none of the keys that requests need.
    """
    # In this order, because another process that makes a store now does so before it marks the folder.
    folder, own = _state_of(blobs_of(data)), data / _DATABASE
    if store_exists(database):
        return True
    if folder.has_files or folder.store_id is not None:
        raise StoreMismatch(
            f"there is no store at {shown_url(database)}, or it is empty, and {data / _FILES} is that of another one: "
            "name its database (--database), or restore it from a backup, or name another data folder (--data)"
        )
    if database != str(own) and own.exists():
        raise StoreMismatch(
            f"there is no store at {shown_url(database)}, or it is empty, and the data folder has a database of its "
            f"own, {own}: leave --database out, or name another data folder (--data)"
        )
    return False


async def open_with_files(database: str, data: Path, *, now: Callable[[], float] | None = None) -> tuple[Store, Blobs]:
    """Open the store at `database` and the files in the folder `data`; make both where neither exists.

    `now` as for `open_store`. Raises `StoreMismatch` when they do not belong together, and what `open_store` raises.
    """
    require_database(database, data)
    store = open_store(database, now=now)
    try:
        return store, await joined(store, data, shown_url(database))
    except BaseException:
        await store.close()
        raise


async def joined(store: Store, data: Path, database: str = "that is open") -> Blobs:
    """Return the files in `data`, after checking that they belong to `store`. Raises `StoreMismatch`.

    `database`: name of the store in messages.
    """
    blobs = blobs_of(data)
    await Custody(store, blobs).join(database)
    return blobs


async def check_folder(store: Store, data: Path, database: str) -> None:
    """Check that `data` is not the folder of another store, for a process that needs no files.

    `database`: address of the store. Raises `StoreMismatch`.
    """
    await Custody(store, blobs_of(data)).check(shown_url(database), inside=database == database_of(None, data))
