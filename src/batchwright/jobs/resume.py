"""Everything on disk that a job is resumed from: its state file with the lock, and the lines in its output."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from batchwright.durable_files import replacing
from batchwright.errors import InputError, ResumeRefused
from batchwright.jobs.compression import reading
from batchwright.jobs.failures import Failures
from batchwright.lines.batch_line import output_id
from batchwright.lines.custom_ids import IdTable
from batchwright.planning.identical import Place

_FORM = 1
_IN_THEIR_ORDER = frozenset({"schema"})
"""Parameters whose parts have an order: properties come in answers, and as columns, in that of the schema."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input. `name` is for messages only: the same content under another name is the same input."""

    name: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """Everything that the results of a job depend on. Runs with equal identities belong to one job."""

    files: tuple[InputFile, ...]
    parameters: Mapping[str, Any]
    """JSON values by name, including sampling defaults."""
    model_files: str | None = None
    """Fingerprint that distinguishes the model from another with the same name or path; None if there is none."""
    limit: int | None = None
    """Number of records at the start of the input that are computed; None: all. A later run may raise it."""

    @property
    def key(self) -> str:
        """Eight hexadecimal digits that distinguish a new job from others."""
        sums = [file.sha256 for file in self.files]
        text = json.dumps([sums[0] if len(sums) == 1 else sums, self.parameters], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def changes(self, saved: JobIdentity, grown: bool) -> list[str]:
        """Descriptions of the differences from `saved`.

        `grown`: whether the input is that of `saved` with something appended, which is not a difference.
        """
        found = []
        if [file.sha256 for file in self.files] != [file.sha256 for file in saved.files] and not grown:
            then, now = (", ".join(file.name for file in each.files) for each in (saved, self))
            found.append(f"the content of the input (then {then}, now {now})")
        is_less = self.limit is not None and (saved.limit is None or saved.limit > self.limit)
        # A sample is drawn from all lines up to the limit.
        if is_less or (self.limit != saved.limit and self.parameters.get("sample") is not None):
            found.append(f"limit (then {json.dumps(saved.limit)}, now {json.dumps(self.limit)})")
        for name in sorted({*self.parameters, *saved.parameters}):
            now_set, then_set = self.parameters.get(name), saved.parameters.get(name)
            if now_set != then_set or (name in _IN_THEIR_ORDER and _order_of(now_set) != _order_of(then_set)):
                found.append(f"{name} (then {json.dumps(then_set)}, now {json.dumps(now_set)})")
        if None not in (self.model_files, saved.model_files) and self.model_files != saved.model_files:
            found.append("the files of the model")
        return found


@dataclass(frozen=True, slots=True)
class JobState:
    """Content of a state file."""

    key: str
    """Key in the ids of the results: that of the identity when the job was new."""
    identity: JobIdentity
    table: Mapping[str, Any] = field(default_factory=dict)
    """What the table of answers was last made from: its columns, and the number of bytes of results."""

    @property
    def content(self) -> dict[str, Any]:
        """Content of the file, as JSON values by name."""
        identity = self.identity
        return {
            "form": _FORM,
            "job": self.key,
            "input": {"name": identity.files[0].name, "sha256": identity.files[0].sha256},
            "files": [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in identity.files],
            "parameters": identity.parameters,
            "model_files": identity.model_files,
            "limit": identity.limit,
            "table": self.table,
        }


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

    def read(self) -> JobState | None:
        """The state that was saved; None if there is none, or only part of one."""
        try:
            content = json.loads(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            if content["form"] != _FORM:
                raise ResumeRefused(
                    f"{self.path} was written by another version of batchwright: finish the job with that, "
                    "or start over with --overwrite"
                )
            first = content["input"]
            # A state without `files` is of a version that did not continue grown inputs: its size is not known.
            files = content.get("files", [{"name": first["name"], "size": -1, "sha256": first["sha256"]}])
            identity = JobIdentity(
                tuple(InputFile(file["name"], file["size"], file["sha256"]) for file in files),
                content["parameters"],
                content.get("model_files"),
                content.get("limit"),
            )
            return JobState(content["job"], identity, content.get("table", {}))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, state: JobState) -> None:
        """Save `state`, durably. Raises OSError."""
        self.write_content(state.content)

    def write_content(self, content: Mapping[str, Any] | None) -> None:
        """Save the content of a state, or that there is none (None). Raises OSError."""
        text = b"" if content is None else json.dumps(content, indent=2).encode() + b"\n"
        # One write over what was there: a run that is killed at any moment leaves the old state or the new one.
        os.pwrite(self._descriptor, text.ljust(os.fstat(self._descriptor).st_size), 0)
        os.ftruncate(self._descriptor, len(text))
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
        self.failures = Failures()
        self.left_out = 0
        """Number of failed lines that will be tried again, which do not count as finished."""

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


def scan(
    path: Path, key: str, ids: IdTable, again: Callable[[Mapping[str, Any]], bool] = lambda error: False
) -> Finished:
    """The finished lines of the job `key` in `path`, whose ids are claimed in `ids`.

    Leaves out failed lines for whose error `again` is true, and half a line at the end, which a killed run leaves.
    Raises `ResumeRefused` for anything else that the job did not write.
    """
    finished = Finished()
    for position, (number, line, raw) in enumerate(_written(path, key), start=1):
        finished.size += len(raw)
        if line.error is not None and again(line.error):
            finished.left_out += 1
            continue
        # A run never writes an id twice.
        if number in finished or ids.claim(line.custom_id, number) is not None:
            raise _foreign(path, position)
        finished.add(number, failed=line.error is not None)
        if line.error is not None:
            finished.failures.add(number, line.custom_id, line.error)
    return finished


def answer_places(path: Path, key: str) -> Iterator[tuple[int, Place]]:
    """The number of each line of the job `key` that has an answer in `path`, and the place of its result."""
    offset = 0
    for number, line, raw in _written(path, key):
        if line.error is None:
            yield number, Place(offset, len(raw))
        offset += len(raw)


def leave_out(path: Path, key: str, again: Callable[[Mapping[str, Any]], bool]) -> int:
    """Remove the failed lines for whose error `again` is true from `path`. Returns its size. Raises OSError."""
    with replacing(path) as file:
        for _, line, raw in _written(path, key):
            if line.error is None or not again(line.error):
                file.write(raw)
    return path.stat().st_size


def sizes_of_lines(path: Path, key: str, again: Callable[[Mapping[str, Any]], bool]) -> Iterator[tuple[int, bool]]:
    """The bytes of each line of the job `key` in `path`, and whether `leave_out` keeps it."""
    for _, line, raw in _written(path, key):
        yield len(raw), line.error is None or not again(line.error)


def states_costs(path: Path, key: str) -> bool:
    """Whether any result of the job `key` in `path` says what it cost."""
    # Within a text, its quotes would be escaped.
    return any(b'"cost":' in raw for _, _, raw in _written(path, key))


def nothing_succeeded(path: Path, key: str) -> bool:
    """Whether `path` holds results of the job `key`, all of them errors. Raises `ResumeRefused` as `scan` does."""
    return all(line.error is not None for _, line, _ in _written(path, key))


def _written(path: Path, key: str) -> Iterator[tuple[int, _WrittenLine, bytes]]:
    """The number, the content and the bytes of each whole line of `path`."""
    decoder = msgspec.json.Decoder(_WrittenLine)
    prefix = output_id(key, 0)[:-1]
    with reading(path) as file:
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
            yield int(number), line, raw


def _order_of(value: object) -> object:
    """The keys within a JSON value, in their order."""
    if isinstance(value, Mapping):
        return [(name, _order_of(inner)) for name, inner in value.items()]
    return [_order_of(each) for each in value] if isinstance(value, list) else None


def _foreign(path: Path, position: int) -> ResumeRefused:
    return ResumeRefused(
        f"{path}, line {position}, was not written by this job: the file was changed since. "
        "Restore it, or start over with --overwrite"
    )


class ResultsByNumber:
    """The result lines in a file, found by the numbers of their lines. Takes 12 bytes of memory for each."""

    def __init__(self, path: Path, key: str) -> None:
        """Reads the file once. Raises OSError."""
        self._offsets = array("q")
        """For each line number, the offset of its result."""
        self._sizes = array("I")
        """For each line number, the bytes of its result; 0 if there is none."""
        position = 0
        for number, _, raw in _written(path, key):
            if number >= len(self._offsets):
                more = bytes(max(number + 1 - len(self._offsets), len(self._offsets) // 2))
                self._offsets.extend(more)
                self._sizes.extend(more)
            self._offsets[number], self._sizes[number] = position, len(raw)
            position += len(raw)
        self._file = path.open("rb")

    def get(self, number: int) -> bytes | None:
        """The result of a line; None if it has none."""
        size = self._sizes[number] if number < len(self._sizes) else 0
        return os.pread(self._file.fileno(), size, self._offsets[number]) if size else None

    def __iter__(self) -> Iterator[bytes]:
        """All results by line number."""
        return (line for number in range(len(self._offsets)) if (line := self.get(number)) is not None)

    def __enter__(self) -> ResultsByNumber:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
