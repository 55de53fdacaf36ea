"""Lines of a job with identical requests: which they are, and their answers, found among the results."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Generic, TypeVar

import msgspec

from batchwright.errors import InvalidRequest, ModelNotFound
from batchwright.jobs.job import Job
from batchwright.jobs.lines import Line
from batchwright.jobs.sink import Sink
from batchwright.lines.batch_line import deduplicated
from batchwright.planning.identical import Place, RepeatFinder, Repeats, Sharing
from batchwright.request import SamplingParams
from batchwright.wire.identity import identity_of

_Line = TypeVar("_Line")

_MOST_WAITING = 2**26
"""Bytes of the lines that may wait for the answers to others, by default."""


class _Response(msgspec.Struct):
    body: dict[str, Any]


class _Answered(msgspec.Struct):
    """A result line with an answer."""

    response: _Response


_decode = msgspec.json.Decoder(_Answered).decode


def find_repeats(
    job: Job,
    defaults: SamplingParams | Mapping[str, Any],
    model: str | None,
    check: Callable[[str, Mapping[str, Any]], object] | None = None,
    *,
    here: bool = False,
) -> Repeats:
    """The lines of `job` whose request is identical to another's, found by reading all of its input.

    `model` is the name for lines that name none. `check` raises `InvalidRequest` or `ModelNotFound` for a body that
    cannot be computed, which is never given another's answer; None: whatever computes it decides. `here`: as for
    `identity_of`. Raises `InputError` if the input is damaged.
    """
    found = _repeats_among(job, defaults, model, lambda line: True, here=here)
    if check is None or not len(found):
        return found
    known = found

    def is_valid(line: Line) -> bool:
        if known.group_of(line.number) is None:
            return False
        try:
            check(line.endpoint, line.body)
        except (InvalidRequest, ModelNotFound):
            return False
        return True

    # Only these few are checked, in another pass.
    return _repeats_among(job, defaults, model, is_valid, here=here)


def _repeats_among(
    job: Job,
    defaults: SamplingParams | Mapping[str, Any],
    model: str | None,
    is_wanted: Callable[[Line], bool],
    *,
    here: bool,
) -> Repeats:
    finder = RepeatFinder()
    for record in job.source.records():
        line = job.parser.parse(record)
        if isinstance(line, Line) and is_wanted(line):
            identity = identity_of(line.endpoint, line.body, defaults, model, here=here)
            if identity is not None:
                finder.add(line.number, identity)
    return finder.repeats()


class IdenticalLines(Generic[_Line]):
    """The lines of a run that wait for the answers to identical ones, and where these answers are.

    No answer is held in memory: it is read from where its result was written, or from a temporary file if results go to
    a stream. A context manager.
    """

    def __init__(
        self,
        repeats: Repeats,
        sink: Sink,
        known: Iterable[tuple[int, Place]] = (),
        *,
        most_waiting: float | None = None,
    ) -> None:
        """`known`: the answers in the results of earlier runs, by the numbers of their lines.

        `most_waiting`: bytes of the lines that may wait, by default for answers that come within minutes.
        """
        self._most_waiting = _MOST_WAITING if most_waiting is None else most_waiting
        self._sharing = Sharing[_Line](repeats)
        self._sink = sink
        self._copies: IO[bytes] | None = None
        """The temporary file, if there is one."""
        if len(repeats):
            for number, place in known:
                self._sharing.know(number, place)

    @property
    def full(self) -> bool:
        """Whether so many lines are waiting that no more should be read."""
        return self._sharing.waiting_bytes >= self._most_waiting

    def __len__(self) -> int:
        """Number of lines that wait for the answer to another."""
        return self._sharing.waiting

    def answer_for(self, number: int) -> dict[str, Any] | None:
        """The answer to a line that need not be sent; None if there is none yet. Raises OSError, ValueError."""
        place = self._sharing.answered_at(number)
        return None if place is None else deduplicated(_decode(self._read(place)).response.body)

    def asked_like(self, number: int) -> _Line | None:
        """The line in progress with the same request as line `number`; None if there is none."""
        return self._sharing.asked_like(number)

    def take_up(self, number: int, line: _Line, size: int) -> bool:
        """Take up a line of `size` bytes. Returns whether to send it; if not, it waits for the answer to another."""
        return self._sharing.take_up(number, line, size)

    def answered(self, number: int, result: bytes, offset: int | None) -> list[_Line]:
        """Note the result of a line that was sent, and return the other lines that it answers.

        `offset`: where it was written; None for a stream. Raises OSError.
        """
        if self._sharing.repeats.group_of(number) is None:
            return []
        if offset is None:
            if self._copies is None:
                self._copies = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `__exit__`
            offset = self._copies.seek(0, os.SEEK_END)
            self._copies.write(result)
        return self._sharing.answered(number, Place(offset, len(result)))

    def failed(self, number: int) -> list[_Line]:
        """Note that a line that was sent has no answer, and return the lines to send now."""
        return self._sharing.failed(number)

    def _read(self, place: Place) -> bytes:
        if self._copies is not None:
            return os.pread(self._copies.fileno(), place.size, place.offset)
        return self._sink.read(place.offset, place.size)

    def __enter__(self) -> IdenticalLines[_Line]:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._copies is not None:
            self._copies.close()
