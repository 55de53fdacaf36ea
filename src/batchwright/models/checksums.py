"""SHA-256 of files, and a memory of those already computed, so that a large file is read once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

import msgspec

from batchwright.models.cache import cache_dir


class _Remembered(msgspec.Struct, frozen=True):
    path: str
    size: int
    mtime_ns: int
    inode: int
    sha256: str


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex. Raises OSError when the file cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Like `file_sha256`, but computed again only when the file's size, time or inode has changed."""
    path = path.resolve()
    stat = path.stat()
    note = cache_dir() / "checksums" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, msgspec.DecodeError):
        known = msgspec.json.decode(note.read_bytes(), type=_Remembered)
        if (known.path, known.size, known.mtime_ns, known.inode) == (
            str(path),
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ino,
        ):
            return known.sha256
    sha256 = file_sha256(path)
    _remember(note, _Remembered(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256))
    return sha256


def _remember(note: Path, entry: _Remembered) -> None:
    # A cache that cannot be written only costs the time to read the file again.
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        draft.write_bytes(msgspec.json.encode(entry))
        draft.replace(note)
