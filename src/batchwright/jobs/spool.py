"""A stream kept in a file, so that it can be counted, compared and read again without being held in memory."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import IO

from batchwright.errors import InputError

_CHUNK = 2**20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises `InputError`."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror}") from error


class Spool:
    """The content of a stream that can be read only once."""

    def __init__(self, name: str, kept: Path | None) -> None:
        """Read the stream `name` (`-`: standard input) to its end. Raises OSError. Stopped before, it leaves no file.

        `kept`: the path that `keep` gives it, or None for a temporary file that is never kept.
        """
        self._kept = kept
        if kept is None:
            with tempfile.NamedTemporaryFile(prefix="batchwright-", suffix=".input", delete=False) as file:
                self.path = Path(file.name)
        else:
            self.path = kept.with_name(kept.name + ".tmp")
        try:
            self.sha256 = self._read(name)
        except BaseException:
            self.remove()
            raise

    def _read(self, name: str) -> str:
        digest = hashlib.sha256()
        with self.path.open("wb") as spool:
            if name == "-":
                _copy(sys.stdin.buffer, spool, digest)
            else:
                with Path(name).open("rb") as stream:
                    _copy(stream, spool, digest)
        return digest.hexdigest()

    def keep(self) -> Path:
        """Keep the file after this run, in place of the one of an earlier run. Returns its path from now on."""
        if self._kept is not None:
            self.path = self.path.replace(self._kept)
        return self.path

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _copy(stream: IO[bytes], spool: IO[bytes], digest: hashlib._Hash) -> None:
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        spool.write(chunk)
