"""Reading the lines of batches, for people: in pages, searched, and failed ones by code.

A call looks at a bounded number of lines and bytes, in threads, and few calls of a tenant do so at a time: no one else
has to wait for a search of a large batch.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from functools import partial

from batchwright.errors import InputBroken, NotFound
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.batches.readable_lines import (
    ErrorGroup,
    ErrorGroups,
    ReadableLine,
    ReadableLines,
    error_code,
    readable,
)
from batchwright.service.files.blobs import Blobs
from batchwright.service.off_loop import off_loop
from batchwright.store.records import BatchRecord, LineState, StoredLine
from batchwright.store.store import Store

_PAGE_LINES = 500
_SEARCHED_LINES = 5000
_SEARCHED_BYTES = 64 * 2**20
"""Bytes of the input that one call searches; a little more if the last lines are long."""
_PIECE_BYTES = 4 * 2**20
"""Bytes of the input that are in memory at a time; more if a single line is."""
_CALLS = 2
"""Most calls of one tenant at a time."""
_GROUPED_LINES = 10_000
"""Failed lines that one call looks at."""
_MOST_GROUPS = 50


class LineReader:
    """Reader of the lines of all batches; each method is for one tenant, and raises what `BatchService.batch` does."""

    def __init__(self, jobs: BatchService, store: Store, blobs: Blobs) -> None:
        self._jobs = jobs
        self._store = store
        self._blobs = blobs
        self._reading: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_CALLS))

    async def lines(
        self,
        tenant: str,
        batch_id: str,
        *,
        after: int = 0,
        limit: int = 20,
        state: LineState | None = None,
        search: str = "",
    ) -> ReadableLines:
        """Return lines of a batch after line `after`, with their prompts and answers.

        `state`: only lines in it. `search`: only lines that contain it; a call looks at a bounded number of lines, so
        it may return fewer than there are.
        """
        batch = await self._kept(tenant, batch_id)
        async with self._reading[tenant]:
            if search:
                found, last = await self._search(batch, after, limit, state, search)
            else:
                page = await self._store.lines(batch_id, after=after, limit=limit, state=state)
                found = [line async for lines, _ in self._read(batch, page, "") for line in lines]
                last = page[-1].number if page else after
            # Pages may be short because of large results: only an empty one is the last.
            more = await self._store.lines(batch_id, after=last, limit=1, state=state)
        return ReadableLines(data=found, next_after=last if more else None)

    async def errors(self, tenant: str, batch_id: str) -> ErrorGroups:
        """Return the failed lines of a batch by code: the most frequent codes of those that one call looks at."""
        batch = await self._kept(tenant, batch_id)
        codes: Counter[str] = Counter()
        first: dict[str, int] = {}
        after = 0
        async with self._reading[tenant]:
            while codes.total() < _GROUPED_LINES:
                page = await self._store.lines(batch_id, after=after, limit=_PAGE_LINES, state="failed")
                if not page:
                    break
                after = page[-1].number
                for number, code in await off_loop(_codes, page):
                    codes[code] += 1
                    first.setdefault(code, number)
            more = await self._store.lines(batch_id, after=after, limit=1, state="failed") if codes else []
            groups = []
            for code, count in codes.most_common(_MOST_GROUPS):
                page = await self._store.lines(batch_id, after=first[code] - 1, limit=1)
                async for lines, _ in self._read(batch, page, ""):
                    groups.append(ErrorGroup(code=code, count=count, example=lines[0]))
        return ErrorGroups(data=groups, counted=codes.total(), has_more=bool(more))

    async def _kept(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises `NotFound` also when its lines were removed with its output files."""
        batch = await self._jobs.batch(tenant, batch_id)
        if batch.lines_removed_at is not None and batch.counts.total:
            raise NotFound(f"the lines of {batch_id!r} were removed with its output files")
        return batch

    async def _search(
        self, batch: BatchRecord, after: int, limit: int, state: LineState | None, search: str
    ) -> tuple[list[ReadableLine], int]:
        """Return the lines found, and the number of the last line that was looked at."""
        found: list[ReadableLine] = []
        looked, size = 0, 0
        while looked < _SEARCHED_LINES and size < _SEARCHED_BYTES:
            page = await self._store.lines(batch.id, after=after, limit=_PAGE_LINES, state=state)
            if not page:
                break
            async for lines, last in self._read(batch, page, search):
                found += lines
                if len(found) >= limit:
                    return found[:limit], found[limit - 1].line
                after = last
            looked += len(page)
            size += sum(line.length or 0 for line in page)
        return found, after

    async def _read(
        self, batch: BatchRecord, lines: Sequence[StoredLine], search: str
    ) -> AsyncIterator[tuple[list[ReadableLine], int]]:
        """Yield the lines that contain `search` with their texts, in pieces, each with the number of its last line."""
        for piece in _pieces(lines):
            spans = [(line.offset or 0, line.length or 0) for line in piece]
            contents: Sequence[bytes | None]
            try:
                contents = await self._blobs.read_spans(batch.input_file_id, spans)
            except (NotFound, InputBroken):
                contents = [None] * len(piece)
            yield await off_loop(partial(_readable, piece, contents, search)), piece[-1].number


def _pieces(lines: Sequence[StoredLine]) -> list[list[StoredLine]]:
    """Divide lines so that the texts of each piece fit into memory."""
    pieces: list[list[StoredLine]] = []
    size = 0
    for line in lines:
        size += line.length or 0
        if not pieces or size > _PIECE_BYTES:
            pieces.append([])
            size = line.length or 0
        pieces[-1].append(line)
    return pieces


def _readable(lines: Sequence[StoredLine], contents: Sequence[bytes | None], search: str) -> list[ReadableLine]:
    shown = (readable(line, content) for line, content in zip(lines, contents, strict=True))
    return [line for line in shown if not search or line.has(search)]


def _codes(lines: Sequence[StoredLine]) -> list[tuple[int, str]]:
    return [(line.number, error_code(line)) for line in lines]
