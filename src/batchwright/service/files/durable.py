"""Changes in the data folder that survive a power cut once the function has returned. All functions block."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from batchwright.durable_files import replacing, sync
from batchwright.errors import StoreUnavailable

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        give_to_owner(folder, folder.parent)
        sync(folder.parent)


def give_to_owner(made: int | Path, folder: Path) -> None:
    """Give what root makes in a folder to the owner of the folder; `made` may be a descriptor."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(made, owner.st_uid, owner.st_gid)


def lock_file(path: Path) -> BinaryIO:
    """Open a file that serves only as a lock; make it if it is missing."""
    with disk_errors():
        make_folder(path.parent)
        return _open(path, os.O_RDWR | os.O_CREAT)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically. One caller at a time."""
    with disk_errors(), replacing(path, partial(_open, flags=os.O_RDWR | os.O_CREAT | os.O_TRUNC)) as file:
        file.write(content)


def move_file(source: Path, target: Path, *, replace: bool = False) -> bool:
    """Rename a file within its file system, and return whether that was done; a missing file is not moved.

    `replace`: also move it where the target exists, which must have the same contents.
    """
    make_folder(target.parent)
    if target.exists() and not replace:
        return False
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    sync(target.parent)
    sync(source.parent)
    return True


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files. Missing ones are ignored."""
    folders = set()
    for path in paths:
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in folders:
        if folder.exists():
            sync(folder)


def lock_unheld(paths: Iterable[Path], held: ExitStack) -> list[Path]:
    """Lock the files that no writer holds, and return their paths. `held` releases the locks.

    A file that cannot be opened or locked counts as held.
    """
    unheld = []
    for path in paths:
        # A shared lock keeps writers out as well; NFS gives no exclusive lock on a file that is open for reading.
        with suppress(OSError):
            file = held.enter_context(path.open("rb", buffering=0))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            unheld.append(path)
    return unheld


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn errors of a disk that is full or takes no writes into `StoreUnavailable`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        reason = f"the data folder cannot be written: {error.strerror}; make room on its disk"
        raise StoreUnavailable(reason, public_message=reason) from error


def _open(path: Path, flags: int) -> BinaryIO:
    """Open a file that only the owner of its folder can access, even if root makes it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    give_to_owner(descriptor, path.parent)
    return os.fdopen(descriptor, "r+b")
