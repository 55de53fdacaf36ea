"""Results of a job at an address: what is written on this machine as lines finish, copied there in parts."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from batchwright.crash_points import crash_point
from batchwright.durable_files import replacing
from batchwright.errors import ResumeRefused
from batchwright.jobs.output_names import EPOCH, LEASE
from batchwright.jobs.remote.addresses import scheme_of
from batchwright.jobs.remote.lease import OutputLease, attempts_in
from batchwright.jobs.remote.parts import (
    MANIFEST,
    Manifest,
    Part,
    new_epoch,
    read_manifest,
    remove_others,
)
from batchwright.jobs.remote.remote_file import RemotePath
from batchwright.jobs.sink import Sink

STATE_VARIABLE = "BATCHWRIGHT_STATE"
PART_BYTES = 16 * 2**20
"""Bytes of results after which a part is written; more when there are many parts."""
PART_SECONDS = 15.0
"""Seconds after which one is written anyway, likewise."""
_MANY = 256
_NOT_LEASED = frozenset({"hf"})
"""Schemes of stores that keep each write as a commit: too slow and too many for renewals."""
_COPIED = 2**20


def work_folder(address: RemotePath) -> Path:
    """The folder on this machine for the job whose output is at an address: its lock, its journals, its results.

    It lies in `$BATCHWRIGHT_STATE`, else where the platform keeps the state of programs.
    """
    configured = os.environ.get(STATE_VARIABLE)
    base = Path(configured).expanduser() if configured else user_state_path("batchwright", appauthor=False)
    return base / "outputs" / hashlib.sha256(address.address.encode()).hexdigest()[:16]


class RemoteResults:
    """The parts of the results at an address, and the file on this machine that they are copied from.

    The file begins with the content of the parts; what follows is not there yet. After a kill, the next run on this
    machine goes on with the file, and one on another machine with the parts, so that there the lines that are in no
    part are computed again. The epoch decides which of them it is, a token that each run puts into the manifest: the
    file belongs to it if the epoch stands beside the file.

    From `restore` to `close` the run holds the lease of the folder. Its number is in the manifest and in the names of
    parts, and before the manifest is written the lease is renewed, and the number compared. Where the store has
    conditional writes, the manifest replaces the one that was compared, or none.
    """

    def __init__(self, folder: RemotePath, file: Path, journals: Iterable[Path]) -> None:
        """`journals`: files and folders on this machine without which it is not known what was paid."""
        self.folder = folder
        self._file = file
        self._journals = tuple(journals)
        self._epochs = file.with_name(file.name + EPOCH)
        self._manifest = Manifest("")
        self._begun = False
        self._lease: OutputLease | None = None
        self.lost_journals: tuple[str, ...] = ()
        """Names of the journals that another machine has, or had."""

    def restore(self, *, copies: bool) -> Mapping[str, Any] | None:
        """Take the lease, and make the file one that begins with the parts, if it `copies`. Returns the job's state.

        Raises OSError, `ResumeRefused` if something else is at the address, or another run writes there.
        """
        manifest = read_manifest(self.folder)
        if manifest is None and self._is_foreign():
            raise ResumeRefused(
                f"{self.folder} exists and does not belong to a batchwright job: name another output, or remove it"
            )
        if scheme_of(self.folder.address) not in _NOT_LEASED:
            self._lease = OutputLease(self.folder, self._file.with_name(self._file.name + LEASE))
            self._lease.take(0 if manifest is None else manifest.attempt)
            self._lease.keep()
            manifest = read_manifest(self.folder)
        if manifest is None:
            self._file.unlink(missing_ok=True)
            self._epochs.unlink(missing_ok=True)
            return None
        self._manifest = manifest
        here = {path.name for path in self._journals if path.exists()}
        self.lost_journals = tuple(name for name in manifest.journals if name not in here)
        if not copies:
            return manifest.state
        is_ours = manifest.epoch in self._known_epochs()
        if not (is_ours and self._file.exists() and self._file.stat().st_size >= manifest.size):
            self._epochs.unlink(missing_ok=True)
            with replacing(self._file) as file:
                for part in manifest.parts:
                    with (self.folder / part.name).open() as source:
                        copied = 0
                        while chunk := source.read(_COPIED):
                            copied += file.write(chunk)
                    if copied != part.size:
                        raise ResumeRefused(
                            f"{self.folder}/{part.name} has {copied} bytes in place of {part.size}: it was changed "
                            "since. Restore it, or start over with --overwrite"
                        )
            self._save_epochs(manifest.epoch)
        return manifest.state

    def _is_foreign(self) -> bool:
        """Whether there is something here that is no lease. There is no manifest."""
        info = self.folder.info()
        if info is None:
            return False
        names = self.folder.listed()
        return info["type"] == "file" or len(attempts_in(names)) < len(names)

    def fence(self) -> int:
        """Make sure that this run holds the output, and return the number of its lease. Raises `ResumeRefused`."""
        if self._lease is None:
            return self._manifest.attempt
        self._lease.renew()
        return self._lease.attempt

    def close(self) -> None:
        """Give up the lease. Safe to call twice."""
        if self._lease is not None:
            self._lease.release()

    @property
    def host(self) -> str:
        """Name of the machine of the run before."""
        return self._manifest.host

    def forget(self) -> None:
        """Have the next `begin` find no parts."""
        self._epochs.unlink(missing_ok=True)
        self._manifest = replace(self._manifest, parts=())

    def begin(self, state: Mapping[str, Any]) -> None:
        """Take over the results, of which this machine has the file. Raises OSError."""
        attempt = self._manifest.attempt + 1 if self._lease is None else self._lease.attempt
        before, now = self._manifest.epoch, new_epoch(attempt)
        self._save_epochs(before, now)
        self._replace_manifest(
            Manifest(now, self._manifest.parts, state, socket.gethostname(), self._journals_here(), attempt)
        )
        self._begun = True
        self._save_epochs(now)
        remove_others(self.folder, self._manifest)

    def replace_lines(self, kept: Iterable[tuple[int, bool]], leave_out: Any) -> None:
        """Have `leave_out` remove lines from the file, and write the parts anew that had some of them.

        `kept`: the size of each line, and whether it is kept. All lines must be in parts. Raises OSError.
        """
        sizes = [0] * len(self._manifest.parts)
        touched, index, offset = set[int](), 0, 0
        for size, is_kept in kept:
            while offset >= self._manifest.parts[index].size:
                index, offset = index + 1, 0
            offset += size
            sizes[index] += size if is_kept else 0
            if not is_kept:
                touched.add(index)
        # A kill from here on has the next run begin with the parts as they are now.
        self._epochs.unlink(missing_ok=True)
        leave_out()
        token, begin, parts = new_epoch(self._manifest.attempt), 0, list[Part]()
        for index, (part, size) in enumerate(zip(self._manifest.parts, sizes, strict=True)):
            if index in touched and size:
                part = self._uploaded(f"part-{part.name.split('-')[1]}-{token}.jsonl", begin, size)
            if size:
                parts.append(part)
            begin += size
        self._replace_manifest(replace(self._manifest, parts=tuple(parts)))
        self._save_epochs(self._manifest.epoch)
        remove_others(self.folder, self._manifest)

    @property
    def size(self) -> int:
        """Bytes of the file that are in parts."""
        return self._manifest.size

    @property
    def pace(self) -> tuple[float, float]:
        """The bytes and the seconds after which the next part is written, so that no job has too many."""
        factor = 1 + len(self._manifest.parts) / _MANY
        return PART_BYTES * factor, PART_SECONDS * factor

    def commit(self, size: int) -> None:
        """Have the first `size` bytes of the file, whole lines, in parts. Raises OSError, `ResumeRefused`."""
        if size <= self.size:
            return
        # Parts may have been removed, so their number says nothing about which names are free.
        last = max((int(part.name.split("-")[1]) for part in self._manifest.parts), default=-1)
        name = f"part-{last + 1:05}-{self._manifest.epoch}.jsonl"
        part = self._uploaded(name, self.size, size - self.size)
        crash_point("results.after_part")
        try:
            parts = (*self._manifest.parts, part)
            self._replace_manifest(replace(self._manifest, parts=parts, journals=self._journals_here()))
        except ResumeRefused:
            with suppress(OSError):
                (self.folder / name).remove()
            raise
        crash_point("results.after_commit")

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Replace the state of the job. Raises OSError."""
        self._replace_manifest(replace(self._manifest, state=state))

    def _replace_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, if this run holds the output. Raises OSError, `ResumeRefused`."""
        place, content = self.folder / MANIFEST, manifest.encode()
        while True:
            if self._lease is not None:
                self._lease.renew()
            # The version first: content that is newer than it makes the write fail, and is looked at again.
            version = place.version_if_any()
            there = place.read_bytes()
            found = None if there is None else Manifest.decode(self.folder, there)
            if there == content:
                break
            if found is None:
                lost = self._begun
            else:
                lost = found.attempt > manifest.attempt or (
                    found.attempt == manifest.attempt and found.epoch != manifest.epoch
                )
            if lost:
                raise ResumeRefused(
                    f"another run has taken over {self.folder} (on {found.host if found else 'another machine'}): end "
                    "it, then run the same command again"
                )
            if place.replace(content, version):
                break
        self._manifest = manifest

    def remove_copy(self) -> None:
        """Remove the file on this machine, once all of it is in parts."""
        self._epochs.unlink(missing_ok=True)
        self._file.unlink(missing_ok=True)

    def _uploaded(self, name: str, offset: int, size: int) -> Part:
        (self.folder / name).upload(self._file, offset, size)
        with self._file.open("rb") as file:
            file.seek(offset)
            lines, left = 0, size
            while left and (chunk := file.read(min(left, _COPIED))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return Part(name, size, lines)

    def _journals_here(self) -> tuple[str, ...]:
        return tuple(path.name for path in self._journals if path.exists())

    def _known_epochs(self) -> list[str]:
        try:
            return [str(epoch) for epoch in json.loads(self._epochs.read_bytes())]
        except (OSError, ValueError):
            return []

    def _save_epochs(self, *epochs: str) -> None:
        with replacing(self._epochs) as file:
            file.write(json.dumps(epochs).encode())


class PartedSink(Sink):
    """A sink whose lines are copied to an address in parts, by a thread of its own."""

    _results: RemoteResults
    _thread: ThreadPoolExecutor
    _committed_at: float
    _commit: Future[None] | None

    def copy_to(self, results: RemoteResults) -> None:
        """Have the lines copied to `results`, whose file this one is. Before the first line."""
        self._results = results
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batchwright-results")
        self._committed_at = self._clock.now()
        self._commit = None

    def write(self, line: bytes) -> None:
        """Append a line. Raises OSError, `ResumeRefused`, also for lines before it."""
        super().write(line)
        if self._commit is not None:
            if not self._commit.done():
                return
            self._finish()
        size, seconds = self._results.pace
        assert self.size is not None
        now = self._clock.now()
        if self.size - self._results.size >= size or now - self._committed_at >= seconds:
            self._committed_at = now
            self._commit = self._thread.submit(self._results.commit, self.size)

    def _finish(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.result()

    def __exit__(self, *exception: object) -> None:
        try:
            # After an error in writing or copying, what is not copied is found in the file by the next run.
            if not isinstance(exception[1], (OSError, ResumeRefused)):
                self._finish()
                assert self.size is not None
                self._results.commit(self.size)
        finally:
            self._thread.shutdown()
            super().__exit__(*exception)
