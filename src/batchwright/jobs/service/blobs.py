"""The bytes of files, on disk: `<folder>/<aa>/<file id>`, where `aa` are the first two hex digits of the id.

A blob is written to a temporary file beside it, made durable, and renamed; so what has the name of a blob is whole.
Its writer holds a lock on it until the record of the file is in the store. What nobody holds and no record names was
left by a crash, and `sweep` removes it.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import re
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from batchwright.errors import InputBroken, NotFound, StoreUnavailable
from batchwright.jobs.crash_points import crash_point
from batchwright.jobs.service.arrivals import Gauge, in_time
from batchwright.jobs.service.limits import Limits
from batchwright.jobs.service.off_loop import off_loop

_ID = re.compile(r"file-([0-9a-f]{2})[0-9a-f]{22}")
_TEMPORARY = ".tmp"
_WRITE_BYTES = 2**20
_READ_BYTES = 2**20
_SWEPT_AT_A_TIME = 256
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}

Span = tuple[int, int]
"""Offset and length, in bytes."""


class BlobWriter:
    """A blob being written. Its methods block: call them in a thread (`off_loop`)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary: Path | None = None
        self._descriptor = -1
        self.size = 0
        self.lines: int | None = None
        """Of an upload, once it has come."""

    def open(self) -> None:
        """Make the temporary file and take its lock."""
        _make_folder(self._path.parent)
        while True:
            path = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._temporary = path
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # A sweep may have taken it for a left-over between the two calls.
            if os.fstat(self._descriptor).st_nlink:
                return
            os.close(self._descriptor)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.size += len(data)

    def keep(self) -> None:
        """Give it its name, durably. The lock stays held."""
        assert self._temporary is not None
        os.fsync(self._descriptor)
        crash_point("blobs.before_rename")
        self._temporary.rename(self._path)
        self._temporary = None
        crash_point("blobs.after_rename")
        _sync_folder(self._path.parent)

    def close(self) -> None:
        """Let go of the lock; without `keep`, nothing is left."""
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Blobs:
    """The blobs of one data folder. Several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for blobs alone; it is made with the first one."""
        self._folder = folder

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file lie. Raises `NotFound` for what is no id, so that no path is made of it."""
        match = _ID.fullmatch(file_id)
        if match is None:
            raise NotFound(f"no file {file_id!r}")
        return self._folder / match[1] / file_id

    @asynccontextmanager
    async def create(self, file_id: str) -> AsyncIterator[BlobWriter]:
        """A new blob, which replaces one of the same id. Kept only by `keep`; add its record before leaving.

        Raises `StoreUnavailable` for a full disk.
        """
        writer = BlobWriter(self.path(file_id))
        with _disk_errors():
            try:
                await off_loop(writer.open)
                yield writer
            finally:
                writer.close()

    @asynccontextmanager
    async def upload(self, file_id: str, chunks: AsyncIterable[bytes], limits: Limits) -> AsyncIterator[BlobWriter]:
        """An input file that has arrived in full: `keep` it, then add its record.

        Nothing is left of an upload that breaks off. Raises `InvalidRequest` (code `file_too_large`) past a limit,
        (code `upload_too_slow`) when it stalls, `StoreUnavailable` for a full disk, and whatever `chunks` raises.
        """
        async with self.create(file_id) as writer:
            gauge = Gauge(limits)
            buffer = bytearray()
            async with aclosing(in_time(chunks, limits)) as timely:
                async for chunk in timely:
                    gauge.take(chunk)
                    buffer += chunk
                    if len(buffer) >= _WRITE_BYTES:
                        await off_loop(writer.write, buffer)
                        buffer.clear()
            await off_loop(writer.write, buffer)
            writer.lines = gauge.lines
            yield writer

    def open(self, file_id: str) -> BinaryIO:
        """For reading, in a thread. Raises `NotFound`."""
        try:
            return self.path(file_id).open("rb")
        except FileNotFoundError:
            raise NotFound(f"no content of file {file_id!r}: it was deleted, or its blob was lost") from None

    async def exists(self, file_id: str) -> bool:
        """Whether there is such a blob."""
        return await off_loop(self.path(file_id).exists)

    async def same(self, old_id: str, new_id: str) -> bool:
        """Whether two blobs have the same bytes. What is gone cannot be told apart, and counts as the same."""
        try:
            return await off_loop(filecmp.cmp, self.path(old_id), self.path(new_id), False)
        except FileNotFoundError:
            return True

    async def read(self, file_id: str, start: int = 0, stop: int | None = None) -> AsyncGenerator[bytes]:
        """The bytes from `start` to before `stop` (None: the end), in pieces. Raises `NotFound`."""
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
        """The bytes of each span, in the order of `spans`; those next to each other are read in one go.

        Raises `NotFound`, and `InputBroken` when the file ends before a span does.
        """
        return await off_loop(self._read_spans, file_id, spans)

    def _read_spans(self, file_id: str, spans: Sequence[Span]) -> list[bytes]:
        pieces = []
        with self.open(file_id) as file:
            for start, members in _together(spans):
                stop = members[-1][0] + members[-1][1]
                content = _pread(file, start, stop - start)
                if len(content) < stop - start:
                    raise InputBroken(f"file {file_id} has no {stop} bytes any more: its blob was damaged")
                pieces += [content[offset - start : offset - start + length] for offset, length in members]
        return pieces

    async def remove(self, file_ids: Iterable[str]) -> None:
        """Remove these blobs, durably. One that is not there is well."""
        paths = [self.path(file_id) for file_id in file_ids]
        await off_loop(_remove, paths)

    async def sweep(self, known: Callable[[Sequence[str]], Awaitable[set[str]]]) -> int:
        """Remove what crashes left behind; how many files. `known` says which ids have a record."""
        names = iter(await off_loop(self._names))
        removed = 0
        while group := [*islice(names, _SWEPT_AT_A_TIME)]:
            removed += await self._sweep(group, known)
        return removed

    async def _sweep(self, group: list[Path], known: Callable[[Sequence[str]], Awaitable[set[str]]]) -> int:
        ids = [path.name for path in group if path.suffix != _TEMPORARY]
        suspects = [*{*ids} - await known(ids)] if ids else []
        wanted = {path for path in group if path.suffix == _TEMPORARY or path.name in suspects}
        if not wanted:
            return 0
        with ExitStack() as held:
            unheld = await off_loop(_lock_unheld, wanted, held)
            # Asked again under the locks: a writer adds the record before it lets go.
            named = await known(suspects) if suspects else set()
            dead = [path for path in unheld if path.name not in named]
            await off_loop(_remove, dead)
            return len(dead)

    def _names(self) -> list[Path]:
        """Of all blobs and temporary files; anything else in the folder is not ours."""
        return [
            path
            for folder in sorted(self._folder.glob("[0-9a-f][0-9a-f]"))
            for path in folder.iterdir()
            if path.suffix == _TEMPORARY or _ID.fullmatch(path.name)
        ]


def _pread(file: BinaryIO, offset: int, count: int) -> bytes:
    """Up to `count` bytes; fewer only at the end."""
    content = os.pread(file.fileno(), count, offset)
    while content and len(content) < count:
        more = os.pread(file.fileno(), count - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


def _together(spans: Sequence[Span]) -> Iterator[tuple[int, list[Span]]]:
    """Runs of spans that follow each other in the file with nothing but an end of line between, up to a size."""
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


def _lock_unheld(paths: Iterable[Path], held: ExitStack) -> list[Path]:
    """Take the locks that nobody holds; `held` lets go of them. Their paths."""
    unheld = []
    for path in paths:
        try:
            file = held.enter_context(path.open("rb", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):
            continue
        unheld.append(path)
    return unheld


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise StoreUnavailable(f"the data folder cannot be written: {error.strerror}; make room on its disk") from error


def _remove(paths: Iterable[Path]) -> None:
    folders = set()
    for path in paths:
        path.unlink(missing_ok=True)
        folders.add(path.parent)
    for folder in folders:
        if folder.exists():
            _sync_folder(folder)


def _make_folder(folder: Path) -> None:
    """With those above it, durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
