"""Files at an address: read in ranges ahead of what is asked for, written whole, and tried again when that fails."""

from __future__ import annotations

import errno
import io
import logging
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

from batchwright.backoff import Backoff
from batchwright.durable_files import TEMPORARY
from batchwright.errors import BatchwrightError, InputError
from batchwright.jobs.remote.addresses import (
    explained,
    filesystem_of,
    is_condition_not_met,
    local_name,
    may_pass,
    scheme_of,
    shown_address,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_BLOCK = 4 * 2**20
"""Bytes that are asked for at once."""
_HEAD = 2**16
"""Bytes of the first block: some look only at the beginning."""
_KEPT = 3
"""Blocks of a file that are in memory, besides the one that is read ahead."""
_UPLOAD_BLOCK = 8 * 2**20
"""Bytes of a part of a multipart upload."""
_COPIED = 2**20
_ATTEMPTS = 10
_SAID_AT = 2
"""Failures in a row of one request from which on they are said."""
_PAUSES = Backoff(0.5, 30.0, jitter=(0.5, 1.0))
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "oci", "oss", "memory"})
"""Schemes of stores in which what is written appears whole or not at all."""
_TAGS = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5", "Digest", "checksum")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "mtime", "updated", "created", "last_commit")


class Version(NamedTuple):
    """What shows whether a file has changed."""

    size: int | None
    """Bytes; None if the store does not say."""
    tag: str | None
    """The store's own fingerprint of the content; None if it has none."""
    modified: str | None


@dataclass(frozen=True)
class RemotePath:
    """The address of a file, used like a path on this machine."""

    address: str

    def __str__(self) -> str:
        return shown_address(self.address)

    @property
    def name(self) -> str:
        """The last part of it."""
        path = urlsplit(self.address).path if scheme_of(self.address) in ("http", "https") else self.address
        return path.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.address.rstrip('/')}/{name}")

    def with_name(self, name: str) -> RemotePath:
        """The file of that name beside this one."""
        return RemotePath(f"{self.address.rstrip('/').rpartition('/')[0]}/{name}")

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        return filesystem_of(self.address)

    @property
    def filesystem(self) -> Any:
        """The fsspec file system. Raises `MissingExtra` and `InputError`."""
        return self._opened[0]

    @property
    def path(self) -> str:
        """The path within it."""
        return self._opened[1]

    def info(self) -> Mapping[str, Any] | None:
        """What the store reports of what is here, as fsspec has it; None if there is nothing. Raises `InputError`."""
        self.filesystem.invalidate_cache()
        try:
            return cast("Mapping[str, Any]", retried(partial(self.filesystem.info, self.path)))
        except BatchwrightError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and explained(self.address, error) == "it does not exist":
                return None
            raise InputError(f"{self} cannot be read: {explained(self.address, error)}") from error

    def exists(self) -> bool:
        return self.info() is not None

    def version(self) -> Version:
        """Raises `InputError` if there is no file."""
        info = self.info()
        if info is None:
            raise InputError(f"input {self} does not exist")
        return _version_in(info)

    def version_if_any(self) -> Version | None:
        """The version of what is here, for `replace`; None if there is nothing. Raises OSError."""
        try:
            info = self.info()
        except InputError as error:
            raise OSError(errno.EIO, str(error), str(self)) from error
        return None if info is None else _version_in(info)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open it for reading bytes; errors while reading are `InputError`s."""
        assert mode == "rb"
        return io.BufferedReader(RemoteFile(self), _COPIED)

    def listed(self) -> list[str]:
        """Names of the files in this folder; none if it is not there. Raises OSError."""
        self.filesystem.invalidate_cache()
        try:
            found = retried(partial(self.filesystem.ls, self.path, detail=True))
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _as_os_error(self, error) from error
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "file")

    def read_bytes(self) -> bytes | None:
        """The whole content, of what is small; None if there is nothing. Raises OSError."""
        self.filesystem.invalidate_cache()
        try:
            return bytes(retried(partial(self.filesystem.cat_file, self.path)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _as_os_error(self, error) from error

    def write_bytes(self, content: bytes) -> None:
        """Replace the content, whole. Raises OSError."""
        self._replace(partial(io.BytesIO, content))

    def create(self, content: bytes) -> bool:
        """Write the content if nothing is here, and return whether it was written. Raises OSError.

        False also if an answer was lost, and the request repeated: read what is there. Some stores check first and then
        write, or do not check at all.
        """
        try:
            return self._written_if(content, mode="create")
        except FileNotFoundError:  # no folder yet, where a store has folders
            self.write_bytes(content)
            return True

    def replace(self, content: bytes, version: Version | None) -> bool:
        """Replace the content if it is still of that version, or nothing if that is None; whether it was replaced.

        Only where the driver has conditional writes; elsewhere it is replaced whatever it is. Raises OSError.
        """
        if version is None:
            return self.create(content)
        if condition := _condition(scheme_of(self.address), version):
            try:
                return self._written_if(content, **condition)
            except FileNotFoundError:
                return False
        self.write_bytes(content)
        return True

    def _written_if(self, content: bytes, **condition: Any) -> bool:
        def write() -> bool:
            try:
                self.filesystem.pipe_file(self.path, content, **condition)
            except Exception as error:
                if is_condition_not_met(error):
                    return False
                unknown = isinstance(error, OSError) and error.errno == errno.ENOSYS
                if not unknown and not isinstance(error, (NotImplementedError, TypeError, ValueError)):
                    raise
                self._write_once(partial(io.BytesIO, content))
            return True

        try:
            return retried(write)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _as_os_error(self, error) from error

    def upload(self, source: Path, offset: int = 0, size: int | None = None) -> None:
        """Replace the content by that of a file on this machine, or by `size` bytes of it. Raises OSError."""
        self._replace(partial(_opened_at, source, offset, size))

    def remove(self) -> None:
        """Remove it, if it is there. Raises OSError."""
        try:
            retried(partial(self.filesystem.rm_file, self.path))
        except FileNotFoundError:
            return
        except Exception as error:
            raise _as_os_error(self, error) from error

    def _replace(self, source: Callable[[], Any]) -> None:
        try:
            retried(partial(self._write_once, source))
        except Exception as error:
            raise _as_os_error(self, error) from error

    def _write_once(self, source: Callable[[], Any]) -> None:
        filesystem, whole = self.filesystem, scheme_of(self.address) in _WHOLE
        target = self.path if whole else self.path + TEMPORARY
        if not whole:
            with suppress(Exception):
                filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        with source() as content:
            file = filesystem.open(target, "wb", block_size=_UPLOAD_BLOCK)
            try:
                shutil.copyfileobj(content, file, _COPIED)
            except BaseException:
                _abandon(file)
                raise
            try:
                file.close()
            except BaseException:
                _abandon(file)
                raise
        if not whole:
            filesystem.mv(target, self.path)


def _condition(scheme: str | None, version: Version) -> dict[str, Any]:
    """What a driver writes with only if the object is still of a version; empty where it has no such condition."""
    if scheme in ("s3", "s3a") and version.tag is not None:
        return {"IfMatch": version.tag}
    if scheme in ("az", "abfs", "abfss") and version.tag is not None:
        from azure.core import MatchConditions

        return {"etag": version.tag, "match_condition": MatchConditions.IfNotModified}
    return {}


def _version_in(info: Mapping[str, Any]) -> Version:
    tag, modified = ((info[name] for name in names if info.get(name)) for names in (_TAGS, _TIMES))
    found = next(tag, None), next(modified, None)
    size = info.get("size")
    return Version(size if isinstance(size, int) else None, *(None if each is None else str(each) for each in found))


AnyPath: TypeAlias = Path | RemotePath
"""The path of a file on this machine, or the address of one elsewhere."""


def located(name: str) -> AnyPath:
    """The path or the address that `name` is."""
    return Path(local_name(name)) if scheme_of(name) is None else RemotePath(name)


def retried(operation: Callable[[], _T]) -> _T:
    """The result of `operation`, which is tried again as long as its error may pass. Raises the last error."""
    import stamina

    failures = 0

    def pause(error: Exception) -> bool | float:
        nonlocal failures
        if not may_pass(error):
            return False
        failures += 1
        if failures == _SAID_AT:
            _log.warning("a store fails (%s): the request is repeated, up to %d times", error, _ATTEMPTS)
        return _PAUSES.pause(failures, random.random())

    for attempt in stamina.retry_context(on=pause, attempts=_ATTEMPTS, timeout=None):
        with attempt:
            return operation()
    raise AssertionError("an attempt returns or raises")


class RemoteFile(io.RawIOBase):
    """The content of a file elsewhere, read in blocks, the next of which is fetched while one is used.

    A connection that breaks is made again where it broke. At most four blocks are in memory.
    """

    def __init__(self, path: RemotePath) -> None:
        """Raises `InputError`."""
        super().__init__()
        self._path = path
        self._size = path.version().size
        self._position = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._last = -1
        """The block that was read last."""
        self._ahead: tuple[int, Future[bytes]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batchwright-read-ahead")
        self._web_file: Any = None
        self._stream: _Stream | None = None if self._size is not None else _Stream(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream is None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._size is None or self._stream is not None:
            raise InputError(f"{self._path} comes from a server that sends no ranges: copy it to this machine first")
        self._position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            found = self._read(len(view))
        except BatchwrightError:
            raise
        except Exception as error:
            raise InputError(f"{self._path} cannot be read: {explained(self._path.address, error)}") from error
        view[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _read(self, most: int) -> bytes | memoryview:
        if self._stream is None and self._size is not None:
            if self._position >= self._size:
                return b""
            index = 0 if self._position < _HEAD else 1 + (self._position - _HEAD) // _BLOCK
            try:
                block = self._block(index)
            except _NoRanges:
                self._stream = _Stream(self._path)
            else:
                begin = self._position - _begin(index)
                if begin >= len(block):
                    raise InputError(f"{self._path} has become shorter while it was being read")
                return memoryview(block)[begin : begin + most]
        assert self._stream is not None
        return self._stream.read(self._position, most)

    def _block(self, index: int) -> bytes:
        block = self._blocks.get(index)
        if block is None:
            ahead, self._ahead = self._ahead, None
            block = ahead[1].result() if ahead is not None and ahead[0] == index else self._fetch(index)
            self._blocks[index] = block
            while len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        if index == self._last + 1 and index > 0 and self._ahead is None and index + 1 not in self._blocks:
            assert self._size is not None
            if _begin(index + 1) < self._size:
                self._ahead = (index + 1, self._thread.submit(self._fetch, index + 1))
        self._last = index
        return block

    def _fetch(self, index: int) -> bytes:
        assert self._size is not None
        begin, end = _begin(index), min(_begin(index + 1), self._size)

        def fetch() -> bytes:
            found = self._range(begin, end)
            if len(found) != end - begin:
                raise OSError(errno.EIO, f"{len(found)} of {end - begin} bytes came")
            return found

        return retried(fetch)

    def _range(self, begin: int, end: int) -> bytes:
        filesystem = self._path.filesystem
        if scheme_of(self._path.address) not in ("http", "https"):
            return bytes(filesystem.cat_file(self._path.path, start=begin, end=end))
        # Only its files notice a server that answers a range with everything.
        if self._web_file is None:
            self._web_file = filesystem.open(
                self._path.path, "rb", block_size=_BLOCK, size=self._size, cache_type="none"
            )
        if not hasattr(self._web_file, "async_fetch_range"):
            raise _NoRanges
        try:
            return bytes(self._web_file._fetch_range(begin, end))  # noqa: SLF001
        except ValueError as error:
            raise _NoRanges from error

    def close(self) -> None:
        if not self.closed:
            self._thread.shutdown(wait=False, cancel_futures=True)
            for each in (self._stream, self._web_file):
                if each is not None:
                    with suppress(Exception):
                        each.close()
            self._blocks.clear()
        super().close()


class _NoRanges(ValueError):
    """The server sends whole files only."""


class _Stream:
    """A file that can only be read from its beginning. After an error it is opened again, and what was read skipped."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._file: Any = None
        self._at = 0

    def read(self, position: int, most: int) -> bytes:
        def read() -> bytes:
            try:
                if self._file is None:
                    self._file, self._at = self._path.filesystem.open(self._path.path, "rb", block_size=0), 0
                while self._at < position:
                    skipped = self._file.read(min(_COPIED, position - self._at))
                    if not skipped:
                        raise OSError(errno.EIO, "it ended too early")
                    self._at += len(skipped)
                found = bytes(self._file.read(most))
            except BaseException:
                self.close()
                raise
            self._at += len(found)
            return found

        return retried(read)

    def close(self) -> None:
        if self._file is not None:
            with suppress(Exception):
                self._file.close()
        self._file = None


class _Span(io.RawIOBase):
    """Some bytes of a file on this machine."""

    def __init__(self, path: Path, offset: int, size: int) -> None:
        super().__init__()
        self._file = path.open("rb")
        self._file.seek(offset)
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self._left]
        count = self._file.readinto(view) or 0
        if not count and self._left and len(view):
            raise OSError(errno.EIO, "the file has become shorter", self._file.name)
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _opened_at(path: Path, offset: int, size: int | None) -> Any:
    return path.open("rb") if size is None else _Span(path, offset, size)


def _begin(index: int) -> int:
    return 0 if index == 0 else _HEAD + (index - 1) * _BLOCK


def _abandon(file: Any) -> None:
    """Give up a file that is being written, so that nothing of it appears, also when it is collected as garbage."""
    with suppress(Exception):
        file.discard()
    with suppress(AttributeError):
        file.closed = True


def _as_os_error(path: RemotePath, error: Exception) -> Exception:
    """The error as one of the system, which ends a run but keeps what is finished; our own as it is."""
    if isinstance(error, BatchwrightError):
        return error
    code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return OSError(code, explained(path.address, error), str(path))
