"""Changes to files that survive a power loss once the function has returned. All functions block."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import InputError

TEMPORARY = ".tmp"
"""Suffix of a file that is being written, beside the one that it will replace."""


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_special(path: Path) -> bool:
    """Whether `path` exists and can only be written to, not replaced: a device, a pipe, a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def followed(path: Path) -> Path:
    """The target of a link; any other path is returned as it is."""
    return path.resolve() if path.is_symlink() else path


def is_same_file(path: Path, other: Path) -> bool:
    """Whether both are names of one file, through links of any kind too."""
    if path.resolve() == other.resolve():
        return True
    with suppress(OSError):
        return path.samefile(other)
    return False


def require_writable(role: str, path: Path, others: Mapping[str, Iterable[Path]]) -> None:
    """Raise `InputError` if `role` cannot be a file at `path`, or if that is one of `others`, by what these are."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"{role} {path}: must be a file in a folder that exists")
    if is_special(path):
        return
    for what, files in others.items():
        if any(is_same_file(path, each) for each in files):
            raise InputError(f"{role} {path} is {what}: name another file")


def write_shared(path: Path, content: bytes) -> None:
    """Write a file that several processes may write at once; the last one's content remains, whole. Raises OSError.

    Missing folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Concurrent writers must not share a temporary file.
    with _taking_place_of(path, path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")) as file:
        file.write(content)


def remove_oldest(folder: Path, pattern: str, keep: int) -> None:
    """Remove files in `folder` whose names match `pattern`, except the `keep` that were written last."""
    found = []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # others remove files too
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[keep:]:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, open_new: Callable[[Path], BinaryIO] | None = None) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` as a whole when the block ends; after an error `path` is unchanged.

    A link stays, and its target is replaced. A device or a pipe is not replaced but written to.

    Only one caller at a time may do this. `open_new` opens the file that is written, emptied if it exists. Raises
    OSError.
    """
    if is_special(path):
        with path.open("wb") as file:
            yield file
        return
    path = followed(path)
    with _taking_place_of(path, path.with_name(path.name + TEMPORARY), open_new) as file:
        yield file


@contextmanager
def _taking_place_of(
    path: Path, temporary: Path, open_new: Callable[[Path], BinaryIO] | None = None
) -> Iterator[BinaryIO]:
    """Write `temporary`, which replaces `path` when the block ends, and is removed after an error."""
    try:
        with temporary.open("wb") if open_new is None else open_new(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.absolute().parent)
