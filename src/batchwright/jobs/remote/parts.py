"""Folders of parts, with a manifest that says which parts are in it: what is written changes only with the manifest."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

from batchwright.durable_files import replacing
from batchwright.errors import ResumeRefused
from batchwright.jobs.remote.remote_file import AnyPath, RemotePath

MANIFEST = "_manifest.json"
"""Name of the manifest. Programs that read folders of tables leave out what begins with `_`."""
_FORM = 1
_ROWS = 2**17
"""Rows of a table in each of its parts."""

NewFile: TypeAlias = Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the folder."""

    name: str
    size: int
    """Bytes."""
    lines: int | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder consists of. Its other files are left from a run that was killed, or belong to one that runs."""

    epoch: str
    """Token of the run that wrote it. A run that finds another one has lost the folder."""
    parts: tuple[Part, ...] = ()
    state: Mapping[str, Any] | None = None
    """The state of the job, as in its file beside an output on this machine."""
    host: str = ""
    """Name of the machine that the run was on."""
    journals: tuple[str, ...] = field(default=())
    """Names of the journals that it left there."""
    attempt: int = 0
    """Number of the lease under which it was written: never lower than that of the manifest before."""

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    def encode(self) -> bytes:
        parts = [{"name": part.name, "size": part.size, "lines": part.lines} for part in self.parts]
        content = {
            "form": _FORM,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "host": self.host,
            "journals": self.journals,
            "state": self.state,
        }
        # A line for each part: it is looked at by people too.
        lines = ",\n".join(json.dumps(part) for part in parts)
        return f'{json.dumps(content)[:-1]}, "parts": [\n{lines}\n]}}\n'.encode()

    @classmethod
    def decode(cls, folder: object, content: bytes) -> Manifest:
        """Raises `ResumeRefused` for anything else than `encode` wrote."""
        try:
            fields = json.loads(content)
            if fields["form"] != _FORM:
                raise ResumeRefused(f"{folder} was written by another version of batchwright: finish the job with that")
            parts = tuple(Part(str(part["name"]), int(part["size"]), part["lines"]) for part in fields["parts"])
            state = fields["state"]
            journals, attempt = tuple(map(str, fields["journals"])), int(fields.get("attempt", 0))
            return cls(str(fields["epoch"]), parts, state, str(fields["host"]), journals, attempt)
        except (ValueError, KeyError, TypeError) as error:
            raise ResumeRefused(f"{folder}/{MANIFEST} is damaged: restore it, or name another output") from error


def read_manifest(folder: AnyPath) -> Manifest | None:
    """The manifest of a folder; None if it has none. Raises OSError, `ResumeRefused`."""
    place = folder / MANIFEST
    content = place.read_bytes() if isinstance(place, RemotePath) or place.is_file() else None
    return None if content is None else Manifest.decode(folder, content)


def write_manifest(folder: AnyPath, manifest: Manifest) -> None:
    """Replace the manifest of a folder, which commits what it names. Raises OSError."""
    place = folder / MANIFEST
    if isinstance(place, RemotePath):
        place.write_bytes(manifest.encode())
    else:
        with replacing(place) as file:
            file.write(manifest.encode())


def remove_others(folder: AnyPath, manifest: Manifest) -> None:
    """Remove parts that are not in the manifest: of runs that were killed, or that it replaces. Raises OSError.

    Parts of later attempts stay: whoever removes may have lost the folder a moment ago.
    """
    kept = {part.name for part in manifest.parts}
    names = folder.listed() if isinstance(folder, RemotePath) else sorted(each.name for each in folder.iterdir())
    for name in names:
        if name.startswith("part-") and name not in kept and attempt_of(name) <= manifest.attempt:
            place = folder / name
            place.remove() if isinstance(place, RemotePath) else place.unlink(missing_ok=True)


def new_epoch(attempt: int = 0) -> str:
    """A token for a run, which begins with the number of its lease, if there is one."""
    token = secrets.token_hex(4)
    return f"{attempt:06}-{token}" if attempt else token


def attempt_of(part: str) -> int:
    """The number of the lease under which a part was written, from its name, `part-NUMBER-EPOCH.SUFFIX`."""
    fields = part.split("-")
    return int(fields[2]) if len(fields) == 4 and fields[2].isdecimal() else 0


Fence: TypeAlias = Callable[[], int]
"""What raises `ResumeRefused` if another run has the output, and returns the number of the lease of this one."""


def no_fence() -> int:
    """The fence of an output on this machine, where a lock keeps others away."""
    return 0


class OutputTarget(Protocol):
    """The place of an output that is made at the end."""

    rows_in_file: int | None
    """Rows after which a new file is to be begun; None: all are in one."""

    def exists(self) -> bool: ...

    def making(self) -> AbstractContextManager[NewFile]:
        """Make it anew: what is written into files that are opened in the block takes its place when the block ends."""

    def remove(self) -> None:
        """Remove it, if it is there. Raises OSError."""


class FileTarget(OutputTarget):
    """A file on this machine."""

    rows_in_file = None

    def __init__(self, path: Path) -> None:
        self._path = path

    def exists(self) -> bool:
        return self._path.exists()

    @contextmanager
    def making(self) -> Iterator[NewFile]:
        yield lambda: replacing(self._path)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class RemoteFileTarget(OutputTarget):
    """A file at an address, which is made on this machine first: what cannot be written halfway can be tried again."""

    rows_in_file = None

    def __init__(self, address: RemotePath, made: Path, fence: Fence) -> None:
        """`made`: path of the file on this machine."""
        self._address = address
        self._made = made
        self._fence = fence

    def exists(self) -> bool:
        return self._address.exists()

    @contextmanager
    def making(self) -> Iterator[NewFile]:
        yield self._file

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        try:
            with self._made.open("w+b") as file:
                yield file
            self._fence()
            self._address.upload(self._made)
        finally:
            self._made.unlink(missing_ok=True)

    def remove(self) -> None:
        self._fence()
        self._address.remove()


class FolderTarget(OutputTarget):
    """A folder of parts, here or elsewhere. What was there before goes when the manifest names what has been made."""

    rows_in_file = _ROWS

    def __init__(self, folder: AnyPath, suffix: str, made: Path, fence: Fence = no_fence) -> None:
        """`suffix` of the names of parts; `made`: path of each part on this machine while it is being made."""
        self._folder = folder
        self._suffix = suffix
        self._made = made
        self._fence = fence

    def exists(self) -> bool:
        return read_manifest(self._folder) is not None

    @contextmanager
    def making(self) -> Iterator[NewFile]:
        epoch = new_epoch(self._fence())
        parts: list[Part] = []

        @contextmanager
        def new_file() -> Iterator[BinaryIO]:
            name = f"part-{len(parts):05}-{epoch}{self._suffix}"
            if isinstance(self._folder, Path):
                self._folder.mkdir(exist_ok=True)
                made = self._folder / name
                with replacing(made) as file:
                    yield file
                size = made.stat().st_size
            else:
                try:
                    with self._made.open("w+b") as file:
                        yield file
                    size = self._made.stat().st_size
                    (self._folder / name).upload(self._made)
                finally:
                    self._made.unlink(missing_ok=True)
            parts.append(Part(name, size))

        yield new_file
        manifest = Manifest(epoch, tuple(parts), attempt=self._fence())
        write_manifest(self._folder, manifest)
        remove_others(self._folder, manifest)

    def remove(self) -> None:
        if self.exists():
            attempt = self._fence()
            manifest = Manifest(new_epoch(attempt), attempt=attempt)
            write_manifest(self._folder, manifest)
            remove_others(self._folder, manifest)
            place = self._folder / MANIFEST
            place.remove() if isinstance(place, RemotePath) else place.unlink(missing_ok=True)
