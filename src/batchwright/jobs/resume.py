"""Everything on disk by which a job is resumed: its state file with the lock, and the lines in its output."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchwright.durable_files import replacing
from batchwright.errors import InputError, ResumeRefused
from batchwright.lines.batch_line import output_id
from batchwright.lines.custom_ids import IdTable

_FORM = 1


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Everything that the results of a job depend on. Runs with equal identities belong to one job."""

    input_sha256: str
    input_name: str
    """Name of the input, for messages only: the same content under another name is the same input."""
    parameters: Mapping[str, Any]
    """JSON values by name, sampling defaults included."""
    model_files: str | None = None
    """Fingerprint that tells the model from another one of the same name or path; None if there is none."""

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that distinguish the job from others."""
        text = json.dumps([self.input_sha256, self.parameters], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def changes(self, saved: JobIdentity) -> list[str]:
        """Descriptions of the differences from `saved`."""
        found = []
        if self.input_sha256 != saved.input_sha256:
            found.append(f"the content of the input (then {saved.input_name}, now {self.input_name})")
        for name in sorted({*self.parameters, *saved.parameters}):
            now, then = self.parameters.get(name), saved.parameters.get(name)
            if now != then:
                found.append(f"{name} (then {json.dumps(then)}, now {json.dumps(now)})")
        if None not in (self.model_files, saved.model_files) and self.model_files != saved.model_files:
            found.append("the files of the model")
        return found


class StateFile:
    """`OUTPUT.batchwright.json`: the identity of the job, and the lock that lets one run at a time write OUTPUT.

    The lock is released when the process ends, however it ends. The file stays when the job is complete, so that the
    same command finds nothing left to do.
    """

    def __init__(self, path: Path) -> None:
        """Takes the lock. Raises `ResumeRefused` if another run holds it, `InputError` if it cannot be written."""
        self.path = path
        self._descriptor = self._locked()

    def _locked(self) -> int:
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise InputError(f"{self.path} cannot be written: {error.strerror}") from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                raise ResumeRefused(
                    f"another run is writing this output (it holds {self.path}): wait for it, or end it"
                ) from error
            # The run before may have removed the file after we opened it: then our lock is worth nothing.
            if self.path.exists() and self.path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
            os.close(descriptor)

    def read(self) -> JobIdentity | None:
        """The identity that was saved; None if there is none, or only part of one."""
        try:
            content = json.loads(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            if content["form"] != _FORM:
                raise ResumeRefused(
                    f"{self.path} was written by another version of batchwright: finish the job with that, "
                    "or start over with --overwrite"
                )
            name, sha256 = content["input"]["name"], content["input"]["sha256"]
            return JobIdentity(sha256, name, content["parameters"], content.get("model_files"))
        except (ValueError, KeyError, TypeError):
            return None

    def write(self, identity: JobIdentity) -> None:
        """Save `identity`, durably. Raises OSError."""
        content = {
            "form": _FORM,
            "job": identity.key,
            "input": {"name": identity.input_name, "sha256": identity.input_sha256},
            "parameters": identity.parameters,
            "model_files": identity.model_files,
        }
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(content, indent=2).encode() + b"\n", 0)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the lock, and remove the file if nothing was saved in it."""
        if not os.fstat(self._descriptor).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class _WrittenLine(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str
    response: msgspec.Raw
    """Response, which is not decoded: its content does not matter here."""
    error: dict[str, Any] | None


class Finished:
    """The set of finished lines, by number, as one bit for each line."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.succeeded = 0
        self.failed = 0
        self.size = 0
        """Number of bytes of the output in whole lines; half a line may follow."""

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def __len__(self) -> int:
        return self.succeeded + self.failed

    def add(self, number: int, *, failed: bool) -> None:
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(max(byte + 1 - len(self._bits), len(self._bits) // 2)))
        self._bits[byte] |= 1 << (number & 7)
        self.failed += failed
        self.succeeded += not failed


def scan(path: Path, key: str, ids: IdTable) -> Finished:
    """The finished lines of the job `key` in `path`, whose ids are claimed in `ids`.

    Ignores half a line at the end, which a killed run leaves. Raises `ResumeRefused` for anything else that the job did
    not write.
    """
    finished = Finished()
    for position, (number, line, size) in enumerate(_written(path, key), start=1):
        # A run never writes an id twice.
        if number in finished or ids.claim(line.custom_id, number) is not None:
            raise _foreign(path, position)
        finished.add(number, failed=line.error is not None)
        finished.size += size
    return finished


def _written(path: Path, key: str) -> Iterator[tuple[int, _WrittenLine, int]]:
    """The number, the content and the size in bytes of each whole line of `path`."""
    decoder = msgspec.json.Decoder(_WrittenLine)
    prefix = output_id(key, 0)[:-1]
    with path.open("rb") as file:
        for position, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = decoder.decode(raw)
            except (msgspec.DecodeError, ValueError):
                raise _foreign(path, position) from None
            number = line.id.removeprefix(prefix)
            if not line.id.startswith(prefix) or not number.isascii() or not number.isdigit():
                raise _foreign(path, position)
            yield int(number), line, len(raw)


def _foreign(path: Path, position: int) -> ResumeRefused:
    return ResumeRefused(
        f"{path}, line {position}, was not written by this job: the file was changed since. "
        "Restore it, or start over with --overwrite"
    )


def write_in_order(unordered: Path, ordered: Path, key: str) -> None:
    """Write the lines of `unordered` into `ordered` by line number: to a file beside it, which is renamed over it.

    Uses 8 bytes of memory for each line. Raises OSError.
    """
    # For each line number, the offset of its line plus one; 0 if there is none.
    offsets = array("q")
    position = 0
    for number, _, size in _written(unordered, key):
        if number >= len(offsets):
            offsets.extend(bytes(max(number + 1 - len(offsets), len(offsets) // 2)))
        offsets[number] = position + 1
        position += size
    with unordered.open("rb") as source, replacing(ordered) as target:
        for offset in offsets:
            if offset:
                source.seek(offset - 1)
                target.write(source.readline())
