"""The link between a database and its folder of files: the id and the mark that both have (`pairing.py`)."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec

from batchwright.crash_points import crash_point
from batchwright.errors import StoreMismatch, StoreUnavailable
from batchwright.service.files.blobs import Blobs, mark_recorded
from batchwright.service.files.durable import lock_file, replace_file
from batchwright.service.files.pairing import NO_MARK, DatabaseState, FolderState, Relation, is_current, relation
from batchwright.service.off_loop import off_loop
from batchwright.store.records import StoreIdentity
from batchwright.store.store import Store

_log = logging.getLogger(__name__)
_NAME = "store.json"
_LOCK = "store.lock"
_LOCK_TRIES = 750
_BETWEEN_TRIES = 0.02
ESTRANGED = (
    "%s was last used with another state of its database: one of the two was copied, or restored from a backup. "
    "No file is removed until somebody says that they belong together: batchwright jobs adopt"
)
"""Log message about a folder, with its name."""
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
"""Reasons for which the two are refused, and the remedies."""


class _Note(msgspec.Struct):
    """Content of the note in the folder."""

    store_id: str
    mark: str


class Custody:
    """Custody of the files of one store. Several processes may have it at once."""

    def __init__(self, store: Store, blobs: Blobs) -> None:
        self._store = store
        self._blobs = blobs

    async def join(self, database: str) -> None:
        """Check that the store and the folder belong together, and give both one id where they have none yet.

        `database`: how the store is called in messages. Raises `StoreMismatch` when they belong to others, or it is not
        certain that they belong together.
        """
        async with self._alone():
            folder = await off_loop(_state_of, self._blobs)
            state = await self._database_state(folder)
            match relation(folder, state):
                case "current":
                    pass
                case "estranged":
                    self._warn()
                case "new":
                    await self._pair(state.identity, None)
                case "known":
                    await self._make_acquainted(folder, state.identity)
                case mismatch:
                    raise StoreMismatch(
                        _MISMATCHES[mismatch].format(
                            database=database,
                            folder=self._blobs.folder,
                            store=state.store_id,
                            folder_store=folder.store_id,
                        )
                    )

    async def check(self, database: str, *, inside: bool) -> None:
        """Do as `join`, for a process that needs the store only: its files may be on another machine.

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

        How many files there are, and how many of them the store knows. The others count as another database's, which
        may come back.
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
        note, identity = await off_loop(_read, self._blobs), await self._store.identity()
        return _agree(note, identity)

    async def renew(self) -> bool:
        """Replace the mark, so that every copy made until now is told from the store. False: this is such a copy."""
        async with self._alone():
            note, identity = await off_loop(_read, self._blobs), await self._store.identity()
            if note is None or identity is None or not _agree(note, identity):
                return False
            await self._write_mark(identity, StoreIdentity(identity.store_id, note.mark, _new_mark()))
            return True

    # What stands where.

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

    # How it is changed.

    async def _make_acquainted(self, folder: FolderState, identity: StoreIdentity | None) -> None:
        await off_loop(self._mark_all_recorded)
        if (identity is None or identity.mark == NO_MARK) and folder.store_id is None:
            await self._pair(identity, None)
            return
        # One of the two is from before they had an id, so it is older than the other: they get the id and no mark.
        if identity is None:
            assert folder.store_id is not None
            await self._set(None, StoreIdentity(folder.store_id, _new_mark()))
        else:
            await off_loop(self._write, _Note(identity.store_id, _new_mark()))
        self._warn()

    async def _pair(self, identity: StoreIdentity | None, folder_id: str | None) -> None:
        """Give both the same id and mark."""
        if identity is None:
            identity = StoreIdentity(folder_id or secrets.token_hex(8), NO_MARK, _new_mark())
            await self._set(None, identity)
        await self._write_mark(identity, StoreIdentity(identity.store_id, identity.mark, _new_mark()))

    async def _write_mark(self, old: StoreIdentity, new: StoreIdentity) -> None:
        """Write the mark to the store, the folder and the store again: one of its two is always the folder's."""
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
        replace_file(self._blobs.folder / _NAME, msgspec.json.encode(note))
        crash_point("custody.after_mark")

    def _mark_all_recorded(self) -> None:
        """Mark all files as recorded: any of them may have a record in a database that is not here."""
        for group in self._blobs.all_blobs():
            for path in group:
                mark_recorded(path)

    def _warn(self) -> None:
        _log.warning(ESTRANGED, self._blobs.folder)

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Keep other processes from reading or changing the mark. Raises `StoreUnavailable` when one takes too long."""
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


def is_used(blobs: Blobs) -> bool:
    """Return whether the folder has files, or is that of a store already. Blocks."""
    state = _state_of(blobs)
    return state.has_files or state.store_id is not None


def _state_of(blobs: Blobs) -> FolderState:
    note = _read(blobs)
    has_files = next(blobs.all_blobs(), None) is not None
    return FolderState(has_files=has_files) if note is None else FolderState(note.store_id, note.mark, has_files)


def _read(blobs: Blobs) -> _Note | None:
    """Read the note. Raises `StoreMismatch` when it cannot be read."""
    path = blobs.folder / _NAME
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
