"""The journal of what a job spends, beside its output: what was reserved, and what became of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from batchwright.durable_files import replacing
from batchwright.errors import InputError, ResumeRefused
from batchwright.jobs.output_names import SPENT
from batchwright.pricing.rates import Picodollars

_FORM = 1
_LONGEST = 16 * 2**20
"""Bytes from which a journal is compacted while the job runs."""
_encode = msgspec.json.Encoder().encode


def journal_path(output: Path) -> Path:
    """The path of the journal of the job that writes `output`."""
    return output.with_name(output.name + SPENT)


@dataclass(slots=True)
class SpendTotals:
    """What all requests of a job cost, in picodollars and tokens."""

    spent: Picodollars = 0
    """Cost of answers."""
    answers: int = 0
    kept: Picodollars = 0
    """Most that requests may have cost whose answers were lost or did not state the cost."""
    lost: int = 0
    """Number of those requests."""
    unbounded: int = 0
    """Number of those requests whose cost has no bound; they are not in `kept`."""
    saved_by_cache: Picodollars = 0
    """What the provider's cache saved, less the extra cost of writing to it."""
    saved_by_batch: Picodollars = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __sub__(self, before: SpendTotals) -> SpendTotals:
        return SpendTotals(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


@dataclass(frozen=True, slots=True)
class Settlement:
    """What one answer cost."""

    cost: Picodollars
    saved_by_cache: Picodollars = 0
    saved_by_batch: Picodollars = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class OpenReservation(NamedTuple):
    """A reservation that has not ended."""

    number: int
    """Number in the journal."""
    amount: Picodollars
    bounded: bool = True
    """Whether `amount` is the most that the request may cost."""


class _Header(msgspec.Struct):
    """First line of a journal: what was spent before it was last compacted."""

    form: int
    job: str
    totals: dict[str, int]


class _Entry(msgspec.Struct, omit_defaults=True):
    """Any other line of a journal. The first field says what happened to which reservation."""

    act: Literal["reserve", "settle", "release", "keep"]
    number: int
    amount: int = 0
    """What was reserved, or what the answer cost."""
    call: str = ""
    """Id of the call for which it was reserved."""
    batch: bool = False
    bounded: bool = True
    saved: tuple[int, int] = (0, 0)
    """What was saved by the cache and by batches."""
    tokens: tuple[int, int, int] = (0, 0, 0)
    """Tokens of the prompt, of those in the cache, and of the answer."""


class SpendJournal:
    """`OUTPUT.spend`: one line when money is reserved, before the call is sent, and one when its cost is known.

    A run that is killed leaves open reservations. The next run counts them as the most that may have been spent
    (`SpendTotals.kept`), except those of lines in a provider's batches, which go on without us: these are in
    `inherited`. Lines are written at once, so that they survive the death of this process. When the journal is opened
    for writing and when it is closed, it is replaced by one with the totals.

    Only one process at a time may have it, which the lock of the job ensures. Nothing is written before the first
    reservation.
    """

    def __init__(self, path: Path | None, job: str, *, starts_over: bool = False, longest: int = _LONGEST) -> None:
        """Reads what earlier runs spent, even of a job whose key is not `job`; with `starts_over`, nothing.

        `path` None: nothing is read or written, as for a job that cannot be resumed. Raises `InputError` for a file
        that cannot be read, `ResumeRefused` for one that no run wrote.
        """
        self._path = path
        self._job = job
        self._longest = longest
        self._descriptor: int | None = None
        self._size = 0
        self._last = 0
        """Number of the last reservation."""
        self._broken: OSError | None = None
        """Error after which nothing may be appended: there may be half a line at the end."""
        self._open: dict[int, _Entry] = {}
        self._is_of_another_job = False
        self.totals = SpendTotals()
        self.inherited: dict[str, OpenReservation] = {}
        """Open reservations of lines in batches, by the ids of their calls."""
        if path is not None and not starts_over:
            self._read(path)
        for number, entry in [*self._open.items()]:
            if entry.batch and not self._is_of_another_job:
                self.inherited[entry.call] = OpenReservation(number, entry.amount, entry.bounded)
            else:
                self._keep(number)

    def reserve(self, call: str, amount: Picodollars, *, batch: bool = False, bounded: bool = True) -> int:
        """Write down a reservation and return its number. Raises OSError, also if an earlier write failed."""
        if self._broken is not None:
            raise self._broken
        self._last += 1
        entry = _Entry("reserve", self._last, amount, call, batch, bounded)
        self._write(entry)
        if self._broken is not None:
            raise self._broken
        self._open[self._last] = entry
        return self._last

    def settle(self, number: int, settlement: Settlement) -> None:
        """Write down what the answer cost."""
        entry = _Entry(
            "settle",
            number,
            settlement.cost,
            saved=(settlement.saved_by_cache, settlement.saved_by_batch),
            tokens=(settlement.prompt_tokens, settlement.cached_tokens, settlement.output_tokens),
        )
        self._end(entry)

    def release(self, number: int) -> None:
        """Write down that a reservation was given back."""
        self._end(_Entry("release", number))

    def keep(self, number: int) -> None:
        """Write down that a reservation counts as spent."""
        self._end(_Entry("keep", number))

    @property
    def open(self) -> list[OpenReservation]:
        """All open reservations, including those of this run."""
        return [OpenReservation(number, entry.amount, entry.bounded) for number, entry in self._open.items()]

    def keep_open(self) -> None:
        """Write down that all open reservations count as spent."""
        for number in [*self._open]:
            self.keep(number)

    def close(self) -> None:
        """Leave only the totals, and what is still open, durably. Raises OSError."""
        if self._descriptor is not None:
            self._compact()
            os.close(self._descriptor)
            self._descriptor = None

    def _end(self, entry: _Entry) -> None:
        self._write(entry)
        # Even if it was not written: the totals of this run are right, and a later run counts the reservation.
        self._apply(entry)

    def _write(self, entry: _Entry) -> None:
        """Append a line that was not applied yet. An error is noted, not raised: an answer may have been paid for."""
        if self._path is None or self._broken is not None:
            return
        try:
            if self._descriptor is None or self._size > self._longest:
                self._compact()
            assert self._descriptor is not None
            line = _encode(entry) + b"\n"
            self._size += len(line)
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError as error:
            self._broken = error

    def _compact(self) -> None:
        """Replace the journal by one with the totals, and the reservations that are open."""
        assert self._path is not None
        header = _Header(_FORM, self._job, asdict(self.totals))
        content = b"".join(_encode(each) + b"\n" for each in (header, *self._open.values()))
        with replacing(self._path) as file:
            file.write(content)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = len(content)
        # What remains open must not be written over and over, however much that is.
        self._longest = max(self._longest, 2 * self._size)

    def _read(self, path: Path) -> None:
        try:
            lines = _whole_lines(path)
            header = next(lines, None)
            if header is None:
                return
            first = msgspec.json.decode(header, type=_Header)
            if first.form != _FORM:
                raise ResumeRefused(f"{path} was written by another version of batchwright: go on with that")
            # A job with other options had no results, or it would have been refused; it may still have cost something,
            # and the budget is that of the output.
            self._is_of_another_job = first.job != self._job
            self.totals = replace(SpendTotals(), **first.totals)
            decode = msgspec.json.Decoder(_Entry).decode
            for line in lines:
                self._apply(decode(line))
        except FileNotFoundError:
            return
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise ResumeRefused(
                f"{path} was not written by this job, so what it has spent is not known: restore it, or remove "
                "it to count from zero"
            ) from error

    def _apply(self, entry: _Entry) -> None:
        """Apply what a line says. Raises KeyError for a reservation that is not open."""
        if entry.act == "reserve":
            self._last = max(self._last, entry.number)
            self._open[entry.number] = entry
        elif entry.act == "keep":
            self._keep(entry.number)
        elif entry.act == "release":
            del self._open[entry.number]
        else:
            del self._open[entry.number]
            totals = self.totals
            totals.spent += entry.amount
            totals.answers += 1
            totals.saved_by_cache += entry.saved[0]
            totals.saved_by_batch += entry.saved[1]
            totals.prompt_tokens += entry.tokens[0]
            totals.cached_tokens += entry.tokens[1]
            totals.output_tokens += entry.tokens[2]

    def _keep(self, number: int) -> None:
        entry = self._open.pop(number)
        self.totals.kept += entry.amount
        self.totals.lost += 1
        self.totals.unbounded += not entry.bounded


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without half a line at its end, which a killed run leaves."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line
