"""`Copies`: claimed lines that ask the same as another of their batch, and are answered without being computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from batchwright.errors import InputBroken, InvalidRequest, NotFound
from batchwright.jobs.lines import check_body
from batchwright.lines.batch_line import decode_line, deduplicated, encode_answer, split_lines
from batchwright.planning.identical import Place, RepeatFinder, Repeats, Sharing
from batchwright.service.files.blobs import Blobs
from batchwright.service.off_loop import off_loop
from batchwright.service.worker.output_lines import key_of
from batchwright.store.records import ClaimedLine, LineResult
from batchwright.store.store import Store
from batchwright.wire.identity import counts_whole, identity_of

Item: TypeAlias = tuple[ClaimedLine, bytes]
"""Claimed line with its bytes in the input file."""
Copy: TypeAlias = tuple[ClaimedLine, bytes]
"""Claimed line with the output of an identical one that was answered."""
_PIECE_LINES = 500
"""Most lines that a thread reads in one go, since it holds the interpreter meanwhile."""
_MOST_BATCHES, _MOST_COPIES = 4096, 5_000_000
"""Most batches whose copies are known at once, and the copies in all of them. To know them again, all of an input is
read, so a worker that takes lines of many tenants in turn must not forget them in between.
"""
_MOST_WAITING = 65_536
_MOST_BYTES = 32 * 2**20
"""Most copies that wait for an answer, and their bytes, approximately. Further ones are computed, since waiting
copies must not keep the worker from lines of others."""
_NONE = RepeatFinder().repeats()


class _Response(msgspec.Struct):
    body: dict[str, Any]


class _Answered(msgspec.Struct):
    """A result line with an answer."""

    response: _Response


_decode = msgspec.json.Decoder(_Answered).decode


class Copies:
    """The copies among the lines that a worker has claimed.

    Which lines have the same request, and which wait for the answer to another, is decided by `Sharing`, one for each
    batch, as for a run. An answer is read where it was committed: in the store, as the result of the line that was
    computed. A copy has a result of its own, committed like any other; it took no tokens. That is made when it is
    committed (`result_of_copy`), since those of all copies of a long answer may take gigabytes.
    """

    def __init__(self, store: Store, blobs: Blobs, *, longest_line: int, here: bool = False) -> None:
        """`here`: whether a model of batchwright's own engine computes them, as for `identity_of`."""
        self._store = store
        self._blobs = blobs
        self._longest_line = longest_line
        self._here = here
        self._sharing: OrderedDict[str, Sharing[Item]] = OrderedDict()
        """By batch; the one that lines were last claimed from is at the end."""
        self._fresh: dict[tuple[str, int], bytes] = {}
        """Results with answers that the store may not have yet, by batch and group."""
        self._committed: set[tuple[str, int]] = set()
        """Keys of those results that the store has."""

    async def answered_before(self, items: Sequence[Item]) -> list[bytes | None]:
        """Return the output of the line that each newly claimed one is a copy of; None unless that was answered.

        Raises what the store raises. `take_up` knows of lines that are answered in the meantime.
        """
        for key in self._committed:
            self._fresh.pop(key, None)
        self._committed.clear()
        answers: dict[tuple[str, int], bytes | None] = {}
        found: list[bytes | None] = []
        for line, _ in items:
            place = await self._place(line)
            answer = None
            if place is not None:
                key = line.batch_id, place.offset
                if key not in answers:
                    answers[key] = await self._answer_at(*key)
                answer = answers[key]
            found.append(answer)
        return found

    def take_up(self, item: Item) -> bytes | bool:
        """Accept a claimed line. Returns the output of an identical one that was answered, if there is one.

        Otherwise returns whether to compute the line; if not, it waits.
        """
        line = item[0]
        sharing = self._sharing.get(line.batch_id)
        group = None if sharing is None else sharing.repeats.group_of(line.number)
        if sharing is None or group is None:
            return True
        if (fresh := self._fresh.get((line.batch_id, group))) is not None:
            return fresh
        if self._full and sharing.asked_like(line.number) is not None:
            return True
        return sharing.take_up(line.number, item, line.length)

    def answered(self, line: ClaimedLine, output: bytes) -> list[ClaimedLine]:
        """Note the result of a line that was answered, and return the copies that waited for it."""
        sharing, group = self._asked(line)
        if sharing is None or group is None:
            return []
        self._fresh[line.batch_id, group] = output
        # The place is the number of the line.
        waited = sharing.answered(line.number, Place(line.number, len(output)))
        return [other for other, _ in waited]

    def failed(self, line: ClaimedLine) -> list[Item]:
        """Note that a line failed, which says nothing about its copies, and return those to compute now."""
        sharing, group = self._asked(line)
        return [] if sharing is None or group is None else sharing.failed(line.number)

    def given_up(self, line: ClaimedLine) -> list[ClaimedLine]:
        """Note that a line is not computed here after all, and return the copies that waited for it."""
        sharing, group = self._asked(line)
        return [] if sharing is None or group is None else [each for each, _ in sharing.given_up(line.number)]

    def committed(self, results: Iterable[LineResult]) -> None:
        """Note results that the store has."""
        for result in results:
            sharing = self._sharing.get(result.batch_id)
            group = None if sharing is None else sharing.repeats.group_of(result.number)
            if group is not None and result.succeeded:
                self._committed.add((result.batch_id, group))

    def forget(self, batch_ids: Collection[str]) -> list[ClaimedLine]:
        """Forget batches, and return their copies that waited."""
        found = [self._sharing.pop(batch_id) for batch_id in batch_ids if batch_id in self._sharing]
        self._fresh = {key: result for key, result in self._fresh.items() if key[0] not in batch_ids}
        return [line for sharing in found for line, _ in sharing.all_waiting()]

    def clear(self) -> None:
        """Forget everything."""
        self._sharing.clear()
        self._fresh.clear()
        self._committed.clear()

    @property
    def _full(self) -> bool:
        """Whether so many copies wait that no more should."""
        waiting = [each for each in self._sharing.values() if each.waiting]
        lines, size = sum(each.waiting for each in waiting), sum(each.waiting_bytes for each in waiting)
        return lines >= _MOST_WAITING or size >= _MOST_BYTES

    def _asked(self, line: ClaimedLine) -> tuple[Sharing[Item] | None, int | None]:
        """Return the sharing and the group of a line that is computed for others too; None if it is not."""
        sharing = self._sharing.get(line.batch_id)
        if sharing is None or sharing.asked_like(line.number) is None:
            return None, None
        return sharing, sharing.repeats.group_of(line.number)

    async def _place(self, line: ClaimedLine) -> Place | None:
        """Return where the answer to a line may be: as the result of line `offset`; None: it is computed now."""
        sharing = self._sharing.get(line.batch_id)
        if sharing is None:
            sharing = Sharing(await self._repeats(line))
            self._let_go()
            self._sharing[line.batch_id] = sharing
        self._sharing.move_to_end(line.batch_id)
        group = sharing.repeats.group_of(line.number)
        if group is None or (line.batch_id, group) in self._fresh or sharing.asked_like(line.number) is not None:
            return None
        if (known := sharing.answered_at(line.number)) is not None:
            return known
        # Another worker may have answered it, or this one before it was started again.
        first = sharing.repeats.first_of(group)
        return None if first == line.number else Place(first, 0)

    async def _repeats(self, line: ClaimedLine) -> Repeats:
        """Return which lines of the batch of `line` ask the same, after reading all of its input."""
        try:
            return await self._read_repeats(line)
        except (NotFound, InputBroken):
            return _NONE  # lines that cannot be read fail for that reason

    async def _read_repeats(self, line: ClaimedLine) -> Repeats:
        blaming = self._blobs.blaming(line.input_file_id)
        with await off_loop(blaming(self._blobs.open), line.input_file_id) as file:
            finder = RepeatFinder()
            lines, identity = split_lines(file, self._longest_line), partial(_identity, line.endpoint, here=self._here)
            while await off_loop(blaming(_read), lines, finder, identity):
                pass
            return await off_loop(finder.repeats)

    def _let_go(self) -> None:
        """Forget the batches that lines were least recently claimed from, to make room for another."""
        batches, copies = len(self._sharing), sum(len(sharing.repeats) for sharing in self._sharing.values())
        forgotten = []
        for batch_id, sharing in self._sharing.items():
            if batches < _MOST_BATCHES and copies <= _MOST_COPIES:
                break
            if not sharing.waiting:
                forgotten.append(batch_id)
                batches, copies = batches - 1, copies - len(sharing.repeats)
        self.forget(forgotten)

    async def _answer_at(self, batch_id: str, number: int) -> bytes | None:
        for stored in await self._store.lines(batch_id, after=number - 1, limit=1):
            if stored.number == number and stored.state == "succeeded":
                return stored.output
        return None


def _read(
    lines: Iterable[tuple[int, int, bytes | None]], finder: RepeatFinder, identity: Callable[[bytes], bytes | None]
) -> bool:
    """Note some more lines. Returns whether there were any."""
    count = 0
    for number, _, content in islice(lines, _PIECE_LINES):
        count += 1
        if content and not content.isspace() and (found := identity(content)) is not None:
            finder.add(number, found)
    return count > 0


def _identity(endpoint: str, content: bytes, *, here: bool) -> bytes | None:
    """Return a value that is equal for lines with the same request; None for a line that must be computed itself."""
    try:
        body = decode_line(content).get("body")
        if not isinstance(body, dict):
            return None
        if here and not counts_whole(body):
            # A line that a model here refuses must not get the answer to one that only seems equal.
            check_body(endpoint, body, None)
    except InvalidRequest:
        return None
    return identity_of(endpoint, body, here=here)


def result_of_copy(line: ClaimedLine, output: bytes) -> LineResult:
    """Return the result of a copy, given the output of the line that was computed."""
    answer = deduplicated(_decode(output).response.body)
    own = encode_answer(key_of(line.batch_id), line.number, line.custom_id, answer)
    return LineResult(line.batch_id, line.number, line.attempt, True, own)
