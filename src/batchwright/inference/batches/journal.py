"""The journal of a job's batches: each action on a batch is written before it is carried out.

The folder of a journal has these files, and is removed when the job is complete:

- `journal.jsonl`: a head, then the state of a batch each time it changes; the last line of a batch applies.
- `UUID.input.jsonl`: the lines of a batch, until its results are here.
- `UUID.results.jsonl`: its results, once it has ended.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Literal, TypeAlias

import msgspec

from batchwright.crash_points import crash_point
from batchwright.durable_files import sync

Stage: TypeAlias = Literal["sealed", "uploading", "uploaded", "creating", "created", "collected", "dropped"]
"""Progress of a batch. Sealed: its input file is complete. Uploading, creating: the request may have been sent, and no
answer is recorded. Collected: it has ended, and its results are here. Dropped: none of it is computed, and its lines
belong to other batches, or to none."""

_NAME = "journal.jsonl"
_FORM = 1


class BatchEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of a batch of a job."""

    uuid: str
    stage: Stage
    endpoint: str
    model: str | None = None
    window: str = "24h"
    lines: int
    size: int
    """Bytes of the input file."""
    tokens: float = 0.0
    """Estimate of its prompt tokens."""
    file: str | None = None
    """Id of the uploaded input file."""
    remote: str | None = None
    """Id of the batch at the provider."""
    attempted_at: float | None = None
    """Unix time of the last request to create it."""
    leaving: bool = False
    """Whether it was cancelled so that its lines become live requests."""

    @property
    def is_open(self) -> bool:
        """Whether its input file may still be needed."""
        return self.stage not in ("collected", "dropped")


class _Head(msgspec.Struct, kw_only=True):
    form: int
    begun: float


class Journal:
    """The journal in one folder. All methods block, for the time of an fsync, and raise OSError."""

    def __init__(self, folder: Path, now: float) -> None:
        """Open the journal, or begin one at the Unix time `now`. An incomplete line left by a killed run is removed."""
        self.folder = folder
        # A thread that seals a batch may still be running when the run ends.
        self._lock = Lock()
        folder.mkdir(exist_ok=True)
        path = folder / _NAME
        begun, entries, size = _read(path)
        self.begun = now if begun is None else begun
        """Unix time at which the first run of the job began."""
        self.entries = entries
        """By uuid, in the order in which they were sealed."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, size)
        if not size:
            self._append(_Head(form=_FORM, begun=now))
            sync(folder)
            sync(folder.absolute().parent)
        self._remove_strangers()

    def _remove_strangers(self) -> None:
        """Remove files of batches that were never sealed, or are no longer needed."""
        for path in self.folder.iterdir():
            uuid, _, rest = path.name.partition(".")
            entry = self.entries.get(uuid)
            is_input = rest == "input.jsonl"
            wanted = entry is not None and entry.stage != "dropped" and (entry.is_open or not is_input)
            if path.name != _NAME and not (wanted and rest in ("input.jsonl", "results.jsonl")):
                path.unlink()

    def input_path(self, uuid: str) -> Path:
        return self.folder / f"{uuid}.input.jsonl"

    def results_path(self, uuid: str) -> Path:
        return self.folder / f"{uuid}.results.jsonl"

    def seal(self, entry: BatchEntry, content: Iterable[bytes]) -> None:
        """Write the input file of a new batch, then record the batch."""
        with self._lock, self.input_path(entry.uuid).open("wb") as file:
            for line in content:
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
            sync(self.folder)
        self.note(entry)

    def note(self, entry: BatchEntry) -> None:
        """Record the state of a batch, durably."""
        crash_point(f"journal.before_{entry.stage}")
        self._append(entry)
        self.entries[entry.uuid] = entry
        if not entry.is_open:
            self.input_path(entry.uuid).unlink(missing_ok=True)
        crash_point(f"journal.after_{entry.stage}")

    def _append(self, record: msgspec.Struct) -> None:
        rest = memoryview(msgspec.json.encode(record) + b"\n")
        with self._lock:
            if self._descriptor < 0:
                raise OSError(errno.EBADF, "the journal is closed", str(self.folder))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1


def may_be_paid(folder: Path) -> bool:
    """Whether the journal in a folder has batches that a provider computes or has computed. Raises OSError."""
    _, entries, _ = _read(folder / _NAME)
    return any(entry.stage in ("creating", "created", "collected") for entry in entries.values())


def _read(path: Path) -> tuple[float | None, dict[str, BatchEntry], int]:
    """Return the beginning of a journal, its entries and the bytes of whole lines; None, no entries and 0 if none."""
    begun: float | None = None
    entries: dict[str, BatchEntry] = {}
    size = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else ()):
        try:
            if not line.endswith(b"\n"):
                break
            if number == 0:
                begun = msgspec.json.decode(line, type=_Head).begun
            else:
                entry = msgspec.json.decode(line, type=BatchEntry)
                entries[entry.uuid] = entry
        except msgspec.MsgspecError as error:
            # No guessing here: an unknown batch would be paid for twice.
            raise OSError(f"line {number + 1} of {path} is damaged ({error}): restore it, or remove it") from error
        size += len(line)
    return begun, entries, size
