"""The sweep over files without a record, as `retention.py` decides.

One process at a time sweeps a folder, the one that holds a lock, since elapsed time is known only between two sweeps of
one process.

Temporary files are removed at once if they are not locked: no record ever names one, and its writer holds a lock on it
until it is renamed.
"""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from batchwright.service.files.blobs import Blobs, mark_recorded, same_bytes, was_recorded
from batchwright.service.files.custody import Custody
from batchwright.service.files.durable import lock_file, lock_unheld, move_file, remove_files, replace_file
from batchwright.service.files.retention import Sighting, Watch, judge
from batchwright.service.off_loop import off_loop
from batchwright.store.store import Store

_NAME = "sightings.json"
_LOCK = "sweeper.lock"


@dataclass(slots=True)
class Swept:
    """Numbers of files that a sweep handled."""

    temporary: int = 0
    """Number of temporary files removed."""
    quarantined: int = 0
    restored: int = 0
    removed: int = 0
    """Number of files removed from the quarantine."""
    estranged: bool = False
    """Whether files were only restored, because the store or the folder is a copy."""


class Sweeper:
    """Sweeper of one process. Call `close` at the end, so that another process can take over."""

    def __init__(self, store: Store, blobs: Blobs, custody: Custody) -> None:
        self._store = store
        self._blobs = blobs
        self._custody = custody
        self._lock: BinaryIO | None = None
        self._swept_at: float | None = None
        self._watches: dict[str, Watch] = {}

    async def sweep(self, now: float) -> Swept:
        """Handle all files. `now`: monotonic seconds.

        Raises `StoreUnavailable`, without removing a file, when the store does not answer or is damaged.
        """
        swept = Swept(temporary=await off_loop(self._remove_temporaries))
        if not await off_loop(self._is_in_charge):
            swept.estranged = not await self._custody.renew()
            return swept
        await self._store.verify()
        swept.estranged = not await self._custody.renew()
        elapsed = 0.0 if self._swept_at is None else now - self._swept_at
        watches: dict[str, Watch] = {}
        for group in await off_loop(lambda: [*self._blobs.all_blobs()]):
            watches |= await self._sweep_group(group, elapsed, swept)
        if swept.estranged:
            # Files that the store does not know may be files whose records it has lost.
            self._swept_at = None
            return swept
        if watches != self._watches:
            content = msgspec.json.encode(watches)
            await off_loop(replace_file, self._blobs.folder / _NAME, content)
        self._watches, self._swept_at = watches, now
        return swept

    def close(self) -> None:
        """Let another process take over."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self._swept_at = None

    async def _sweep_group(self, group: Sequence[Path], elapsed: float, swept: Swept) -> dict[str, Watch]:
        known = await self._store.known_files([path.name for path in group])
        await off_loop(self._keep, [path for path in group if path.name in known], swept)
        suspects = [path for path in group if path.name not in known]
        if not suspects or swept.estranged:
            return {}
        with ExitStack() as held:
            unheld = await off_loop(lock_unheld, suspects, held)
            # Asked again under the locks, since a writer adds the record before it releases its lock.
            known = await self._store.known_files([path.name for path in unheld])
            return await off_loop(self._judge, unheld, known, elapsed, swept)

    def _keep(self, paths: Sequence[Path], swept: Swept) -> None:
        for path in paths:
            mark_recorded(path)
            if path.parent == self._blobs.quarantine:
                place = self._blobs.path(path.name)
                if move_file(path, place):
                    swept.restored += 1
                elif same_bytes(path, place):  # not kept twice
                    remove_files([path])

    def _judge(self, paths: Sequence[Path], known: set[str], elapsed: float, swept: Swept) -> dict[str, Watch]:
        """Carry out the decision about each file, and return their watches from now on."""
        watches = {}
        for path in paths:
            try:
                seen = Sighting(
                    stamp=str(path.stat().st_mtime_ns),
                    quarantined=path.parent == self._blobs.quarantine,
                    recorded=path.name in known,
                    ever_recorded=was_recorded(path),
                )
            except FileNotFoundError:
                continue
            verdict, watch = judge(seen, self._watches.get(self._key(path)), elapsed)
            place = path
            match verdict:
                case "restore":
                    self._keep([path], swept)
                case "quarantine":
                    place = self._blobs.quarantine / path.name
                    move_file(path, place, replace=True)
                    swept.quarantined += 1
                case "remove":
                    remove_files([path])
                    swept.removed += 1
            if watch is not None:
                watches[self._key(place)] = watch
        return watches

    def _key(self, path: Path) -> str:
        return path.relative_to(self._blobs.folder).as_posix()

    def _remove_temporaries(self) -> int:
        removed = 0
        for group in self._blobs.temporaries():
            with ExitStack() as held:
                abandoned = lock_unheld(group, held)
                remove_files(abandoned)
            removed += len(abandoned)
        return removed

    def _is_in_charge(self) -> bool:
        if self._lock is not None:
            return True
        lock = lock_file(self._blobs.folder / _LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock, self._swept_at, self._watches = lock, None, self._read()
        return True

    def _read(self) -> dict[str, Watch]:
        """Return the watches of the process before this one; none if they cannot be read."""
        try:
            return msgspec.json.decode((self._blobs.folder / _NAME).read_bytes(), type=dict[str, Watch])
        except (OSError, ValueError):
            return {}
