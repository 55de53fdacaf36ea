"""The records of an input longer than the windows of an order, read so that lines that begin alike meet."""

from __future__ import annotations

import logging
import pickle
import tempfile
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from batchwright.errors import InputError
from batchwright.jobs.compression import COMPRESSED
from batchwright.jobs.job import Job, local_output
from batchwright.jobs.line_orders import waits_for_others
from batchwright.jobs.lines import Line
from batchwright.jobs.sources import LineSource, Record
from batchwright.lines.batch_line import line_too_long, split_lines
from batchwright.planning.file_order import FileOrder
from batchwright.wire.identity import cacheable_prompt

_log = logging.getLogger(__name__)

_IN_PROMPTS = frozenset({"functions", "input", "instructions", "messages", "prompt", "tools"})
"""Fields that become part of a prompt here."""


class _Records(Protocol):
    """Records that can be read one by one, in any order."""

    def __len__(self) -> int:
        """Number of the records."""

    def read(self, index: int) -> Record:
        """Record number `index` of those that are to be computed, counted from 0 in the order of the file."""


@contextmanager
def ordered_records(
    job: Job, most_lines: int, most_bytes: int, *, least_shared: int = 0, is_elsewhere: bool = False
) -> Iterator[Iterator[Record] | None]:
    """The records that earlier runs did not finish, in an order of the whole file, for the duration of the block.

    None if windows of `most_lines` lines or `most_bytes` bytes find about as much of what lines share, in prefixes of
    `least_shared` bytes or more, in the order of the file. Lines with a priority or a deadline of their own come first.
    `is_elsewhere`: whether a provider's cache compares the prompts, rather than ours.

    Takes one pass over the file to decide, and another to note where records are. Lines get their ids in the order of
    the file, so that the first of two with the same id has it. Raises `InputError` if the input is damaged, or changed
    meanwhile.

    Lines of one plain file on this machine are read where they are. Rows, items of a JSON array, and lines of several
    files, of a sample, of a compressed file or of one elsewhere are copied to a temporary file beside the output.
    """
    order, urgent = FileOrder(least_shared), bytearray()
    for record in _unfinished(job):
        line = job.parser.parse(record)
        job.ids.assign(line.number, line.custom_id)
        order.add(*(_prompt(line, is_elsewhere=is_elsewhere) if isinstance(line, Line) else (b"", b"")))
        urgent.append(isinstance(line, Line) and not waits_for_others(line.body))
    found = order.order(most_lines, most_bytes)
    del order
    if found is None:
        yield None
        return
    found = found[np.argsort(np.frombuffer(urgent, np.uint8)[found] == 0, kind="stable")]
    with ExitStack() as opened:
        records = _opened(job, opened)
        if records is not None and len(records) != len(found):
            job.check_unchanged()
            raise InputError("the input changed while it was being read: run the same command again")
        yield None if records is None else (records.read(int(index)) for index in found)


def _prompt(line: Line, *, is_elsewhere: bool) -> tuple[bytes, bytes]:
    if is_elsewhere:
        return cacheable_prompt(line.endpoint, line.body)
    return cacheable_prompt(line.endpoint, {name: line.body[name] for name in _IN_PROMPTS & line.body.keys()})


def _unfinished(job: Job) -> Iterator[Record]:
    return (record for record in job.source.records() if record.number not in job.finished)


def _opened(job: Job, opened: ExitStack) -> _Records | None:
    """The records, whose file is closed with `opened`; None if they can be read neither in place nor from a copy."""
    if (path := _plain_file(job)) is not None:
        return _InPlace(job, opened.enter_context(path.open("rb")))
    folder = None if job.spec.to_stream else local_output(job.spec).parent
    try:
        with ExitStack() as copying:
            copied = _Copied(job, copying.enter_context(tempfile.TemporaryFile(dir=folder)))
            opened.push(copying.pop_all())
            return copied
    except OSError as error:
        _log.warning("lines keep the order of the file, since it cannot be copied to read it in another: %s", error)
        return None


def _plain_file(job: Job) -> Path | None:
    """The path of the input if it is one file of lines that can be read from anywhere; None if it is not."""
    path = job.source.path if isinstance(job.source, LineSource) else None
    return path if isinstance(path, Path) and path.is_file() and path.suffix.lower() not in COMPRESSED else None


class _InPlace:
    """Lines of a file. Takes 16 bytes for each."""

    def __init__(self, job: Job, file: IO[bytes]) -> None:
        self._file, self._limit = file, job.spec.max_line_bytes
        self._numbers, self._places = array("Q"), array("Q")
        self._too_long = set[int]()
        for number, place, content in split_lines(file, self._limit):
            if (content is None or content.strip()) and number not in job.finished:
                self._numbers.append(number)
                self._places.append(place)
            if content is None:
                self._too_long.add(number)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Record:
        number = self._numbers[index]
        if number in self._too_long:
            return Record(number, line_too_long(self._limit))
        self._file.seek(self._places[index])
        return Record(number, self._file.readline(self._limit + 2).rstrip(b"\r\n"))


class _Copied:
    """A copy of records. Takes 8 bytes for each in memory."""

    def __init__(self, job: Job, file: IO[bytes]) -> None:
        self._file, self._places = file, array("Q")
        for record in _unfinished(job):
            self._places.append(file.tell())
            pickle.dump(record, file, pickle.HIGHEST_PROTOCOL)
        file.flush()  # a full disk is noticed here

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Record:
        self._file.seek(self._places[index])
        record: Record = pickle.load(self._file)
        return record
