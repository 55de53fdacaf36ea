"""The bytes of files, on disk: `<folder>/<aa>/<file id>`, where `aa` are the first two hex digits of the id.

A blob is written to a temporary file beside it, made durable, and renamed, so a file with the name of a blob is whole.
Its writer holds a lock on it until the record of the file is in the store, and then removes the permission to write,
which marks blobs that have, or had, a record. Blobs that have neither lock nor record are handled by `sweeper.py`,
which may move them to `<folder>/quarantine`; a blob that is asked for is moved back from there.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import re
import secrets
import shutil
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from batchwright.crash_points import crash_point
from batchwright.durable_files import TEMPORARY, sync
from batchwright.errors import InputBroken, InvalidRequest, NotFound, StoreUnavailable
from batchwright.service.files.durable import disk_errors, give_to_owner, make_folder, move_file, remove_files
from batchwright.service.limits import ServiceLimits
from batchwright.service.off_loop import off_loop


class UploadMeter:
    """Meter of an upload, which checks its limits as it arrives."""

    def __init__(self, limits: ServiceLimits) -> None:
        self._limits = limits
        self._bytes = 0
        self._newlines = 0
        self._open = 0
        """Number of bytes since the last newline."""
        self._returned = False
        """Whether the last byte is a carriage return, which does not count if it ends the line."""

    @property
    def lines(self) -> int:
        """Number of lines so far, blank ones included."""
        return self._newlines + (self._open > 0)

    def take(self, chunk: bytes) -> None:
        """Count a chunk of the upload. Raises `InvalidRequest` past a limit."""
        limits = self._limits
        self._bytes += len(chunk)
        if self._bytes > limits.max_file_bytes:
            raise _too_large(f"the file has more than {limits.max_file_bytes:,} bytes")
        # A shorter chunk cannot make any line too long.
        if self._open + len(chunk) > limits.max_line_bytes:
            self._measure_lines(chunk)
        self._newlines += chunk.count(b"\n")
        last = chunk.rfind(b"\n")
        if self._newlines + (last + 1 < len(chunk)) > limits.max_lines:
            raise _too_large(f"the file has more than {limits.max_lines:,} lines")
        self._open = self._open + len(chunk) if last < 0 else len(chunk) - last - 1
        self._returned = chunk.endswith(b"\r") if chunk else self._returned

    def _measure_lines(self, chunk: bytes) -> None:
        before, returned = self._open, self._returned
        for number, line in enumerate(chunk.split(b"\n"), self._newlines + 1):
            returned = line.endswith(b"\r") if line else returned
            if before + len(line) - returned > self._limits.max_line_bytes:
                raise _too_large(f"line {number:,} has more than {self._limits.max_line_bytes:,} bytes")
            before, returned = 0, False


def _too_large(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what}: split it into several files, or raise the limit of the service", param="file", code="file_too_large"
    )


_ID = re.compile(r"file-([0-9a-f]{2})[0-9a-f]{22}")
_TEMPORARY_NAME = re.compile(rf"{_ID.pattern}\.[0-9a-f]+{re.escape(TEMPORARY)}")
STORE_NOTE = "store.json"
"""Name of the file in the folder that says to which store the blobs belong (`custody.py`)."""
_QUARANTINE = "quarantine"
_GROUP = 256
_WRITE_BYTES = 2**20
_READ_BYTES = 2**20
_OF_THE_PROCESS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that say nothing about the file that was to be read."""

_RECORDED = stat.S_IRUSR
"""Permissions of a blob that has, or had, a record. Copies with permissions keep this mark."""

Span = tuple[int, int]
"""Offset and length, in bytes."""


class BlobWriter:
    """A blob being written. Its methods block, so call them in a thread (`off_loop`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: Path | None = None
        self._descriptor = -1
        self.size = 0
        self.lines: int | None = None
        """Number of lines; None unless it is an upload that has arrived in full."""

    def open(self) -> None:
        """Make the temporary file and take its lock."""
        make_folder(self._path.parent)
        while True:
            path = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}{TEMPORARY}")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._temporary = path
            give_to_owner(self._descriptor, path.parent)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # Between the two calls a sweep may have removed it as abandoned.
            if os.fstat(self._descriptor).st_nlink:
                return
            self._temporary = None
            self.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.size += len(data)

    def keep(self) -> None:
        """Give the blob its name, durably. The lock is still held afterwards."""
        assert self._temporary is not None
        os.fsync(self._descriptor)
        crash_point("blobs.before_rename")
        self._temporary.rename(self._path)
        self._temporary = None
        crash_point("blobs.after_rename")
        sync(self._path.parent)

    def mark_recorded(self) -> None:
        """Mark the blob as one that has a record. Does nothing without `keep`."""
        if self._temporary is None and self._descriptor >= 0:
            with suppress(OSError):  # the next sweep tries again
                os.fchmod(self._descriptor, _RECORDED)

    def close(self) -> None:
        """Release the lock, and remove the blob unless `keep` was called."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Blobs:
    """The blobs of one data folder. Several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        """`folder` contains nothing but blobs; it is made with the first one."""
        self.folder = folder
        self.quarantine = folder / _QUARANTINE

    def path(self, file_id: str) -> Path:
        """Return the path of a file's bytes. Raises `NotFound` for an invalid id, from which no path is made."""
        match = _ID.fullmatch(file_id)
        if match is None:
            raise NotFound(f"no file {file_id!r}")
        return self.folder / match[1] / file_id

    @asynccontextmanager
    async def create(self, file_id: str) -> AsyncIterator[BlobWriter]:
        """Write a new blob, which replaces one with the same id; `keep` it, and add its record inside the block.

        Raises `StoreUnavailable` for a full disk.
        """
        writer = BlobWriter(self.path(file_id))
        with disk_errors():
            try:
                await off_loop(writer.open)
                yield writer
                writer.mark_recorded()
            finally:
                writer.close()

    @asynccontextmanager
    async def upload(
        self, file_id: str, chunks: AsyncIterable[bytes], limits: ServiceLimits
    ) -> AsyncIterator[BlobWriter]:
        """Receive an input file in full; `keep` it, and add its record inside the block.

        Nothing is left of an upload that breaks off. Raises `InvalidRequest` (code `file_too_large`) past a limit,
        `StoreUnavailable` for a full disk, and whatever `chunks` raises.
        """
        async with self.create(file_id) as writer:
            meter = UploadMeter(limits)
            buffer = bytearray()
            async for chunk in chunks:
                meter.take(chunk)
                buffer += chunk
                if len(buffer) >= _WRITE_BYTES:
                    await off_loop(writer.write, buffer)
                    buffer.clear()
            await off_loop(writer.write, buffer)
            writer.lines = meter.lines
            yield writer

    def open(self, file_id: str) -> BinaryIO:
        """Open a blob for reading, in a thread. Raises `NotFound`."""
        path = self.path(file_id)
        try:
            self._bring_back(path)
            return path.open("rb")
        except FileNotFoundError:
            raise NotFound(f"no content of file {file_id!r}: it was deleted, or its blob was lost") from None

    async def exists(self, file_id: str) -> bool:
        """Return whether there is such a blob."""
        path = self.path(file_id)
        return await off_loop(lambda: path.exists() or (self.quarantine / file_id).exists())

    async def holds(self, file_id: str, content: bytes) -> bool:
        """Return whether a blob has these bytes, or is missing, so that it cannot be known."""
        return await off_loop(self._holds, file_id, content)

    def _holds(self, file_id: str, content: bytes) -> bool:
        try:
            with self.open(file_id) as file:
                return file.read(len(content) + 1) == content
        except NotFound:
            return True

    async def read(self, file_id: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """Yield the bytes from `start` to `stop` (exclusive; None: the end) in pieces. Raises `NotFound`."""
        with await off_loop(self.open, file_id) as file:
            offset = start
            while stop is None or offset < stop:
                count = _READ_BYTES if stop is None else min(_READ_BYTES, stop - offset)
                piece = await off_loop(_pread, file, offset, count)
                if not piece:
                    return
                offset += len(piece)
                yield piece

    async def read_spans(self, file_id: str, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each span, in the order of `spans`; adjacent spans are read in one go.

        Raises `NotFound`, and `InputBroken` when the file ends before a span does, or when it alone cannot be read;
        and `OSError` when others may not be readable either.
        """
        return await off_loop(self._read_spans, file_id, spans)

    def _read_spans(self, file_id: str, spans: Sequence[Span]) -> list[bytes]:
        pieces = []
        with self.blaming(file_id), self.open(file_id) as file:
            for start, members in _together(spans):
                stop = members[-1][0] + members[-1][1]
                content = _pread(file, start, stop - start)
                if len(content) < stop - start:
                    raise InputBroken(f"file {file_id} has no {stop} bytes any more: its blob was damaged")
                pieces += [content[offset - start : offset - start + length] for offset, length in members]
        return pieces

    @contextmanager
    def blaming(self, file_id: str) -> Iterator[None]:
        """Turn an `OSError` of reading a file into `InputBroken`, and let `NotFound` pass, if others can be read.

        Raises `OSError` otherwise. Blocks, so decorate what runs in a thread with it.
        """
        try:
            yield
        except NotFound:
            self._require_folder()
            raise
        except OSError as error:
            if error.errno in _OF_THE_PROCESS:
                raise
            self._require_folder()
            reason = f"file {file_id} cannot be read: {error.strerror}; see to its disk and its permissions"
            raise InputBroken(reason) from error

    def _require_folder(self) -> None:
        """Raise `OSError` if the whole folder cannot be read, as when its file system is away."""
        with os.scandir(self.folder) as entries:
            next(entries, None)
        # Where a file system is mounted there is an empty folder without it.
        (self.folder / STORE_NOTE).stat()

    async def remove(self, file_ids: Iterable[str]) -> None:
        """Remove blobs durably, from the quarantine too. Missing ones are ignored."""
        paths = [path for file_id in file_ids for path in (self.path(file_id), self.quarantine / file_id)]
        await off_loop(remove_files, paths)

    def _bring_back(self, path: Path) -> None:
        """Move a blob out of the quarantine if it is there."""
        if not path.exists() and (self.quarantine / path.name).exists():
            move_file(self.quarantine / path.name, path)

    # Operations on all blobs. These block.

    def all_blobs(self) -> Iterator[list[Path]]:
        """Yield all blobs in groups, those in the quarantine last. Other files in the folder are ignored."""
        for folder in [*self._folders(), self.quarantine]:
            yield from _groups(folder, _ID)

    def temporaries(self) -> Iterator[list[Path]]:
        """Yield, in groups, files that are being written, or were when their writer died."""
        for folder in self._folders():
            yield from _groups(folder, _TEMPORARY_NAME)

    def _folders(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9a-f][0-9a-f]"))

    def require_room(self, least: int) -> None:
        """Raise `StoreUnavailable` when the disk has less than `least` bytes free."""
        folder = next(each for each in (self.folder, *self.folder.parents) if each.exists())
        free = shutil.disk_usage(folder).free
        if free < least:
            raise StoreUnavailable(
                f"the disk of {self.folder} has {free:,} bytes free, and min_free_disk is {least:,}: make room on it",
                public_message="the disk of the service is almost full: its operator must make room",
            )


def was_recorded(path: Path) -> bool:
    """Return whether a blob has, or had, a record in a database. Raises `FileNotFoundError`."""
    return not path.stat().st_mode & stat.S_IWUSR


def mark_recorded(path: Path) -> None:
    """Mark a blob as one that has a record, where the file system can. A missing one is ignored."""
    with suppress(OSError):
        if not was_recorded(path):
            path.chmod(_RECORDED)


def same_bytes(one: Path, other: Path) -> bool:
    """Return whether both files exist and have the same contents."""
    try:
        return filecmp.cmp(one, other, shallow=False)
    except FileNotFoundError:
        return False


def _groups(folder: Path, name: re.Pattern[str]) -> Iterator[list[Path]]:
    """Yield the files of a folder whose names match, a few hundred at a time."""
    try:
        found = [Path(entry) for entry in os.scandir(folder) if name.fullmatch(entry.name)]
    except FileNotFoundError:
        return
    yield from (found[start : start + _GROUP] for start in range(0, len(found), _GROUP))


def _pread(file: BinaryIO, offset: int, count: int) -> bytes:
    """Return up to `count` bytes; fewer only at the end of the file."""
    content = b""
    while len(content) < count and (more := os.pread(file.fileno(), count - len(content), offset + len(content))):
        content += more
    return content


def _together(spans: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Yield (start, spans) of runs of spans with nothing but an end of line between them, up to a size."""
    run: list[Span] = []
    for offset, length in spans:
        if run:
            end = run[-1][0] + run[-1][1]
            if not (end <= offset <= end + 2 and offset + length - run[0][0] <= _READ_BYTES):
                yield run[0][0], run
                run = []
        run.append((offset, length))
    if run:
        yield run[0][0], run
