"""Reading the lines of batches, for people: in pages, searched, and failed ones by code."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.errors import InputBroken, NotFound
from batchwright.service.batches.batch_service import BatchService
from batchwright.service.batches.readable_lines import (
    ErrorGroups,
    ReadableLine,
    ReadableLines,
    groups_of,
    readable,
)
from batchwright.service.files.blobs import Blobs
from batchwright.service.off_loop import off_loop
from batchwright.store.records import BatchRecord, LineState, StoredLine
from batchwright.store.store import Store

_PAGE_LINES = 500
_SEARCHED_PAGES = 10
"""Pages that one call searches."""
_GROUPED_LINES = 10_000
"""Failed lines that one call looks at."""


class LineReader:
    """Reader of the lines of all batches; each method is for one tenant, and raises what `BatchService.batch` does."""

    def __init__(self, jobs: BatchService, store: Store, blobs: Blobs) -> None:
        self._jobs = jobs
        self._store = store
        self._blobs = blobs

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
        batch = await self._jobs.batch(tenant, batch_id)
        found: list[ReadableLine] = []
        for _ in range(_SEARCHED_PAGES if search else 1):
            page = await self._store.lines(batch_id, after=after, limit=_PAGE_LINES if search else limit, state=state)
            for line in await self._readable(batch, page):
                after = line.line
                if not search or line.has(search):
                    found.append(line)
                    if len(found) == limit:
                        break
            if not page or len(found) == limit:
                break
        # Pages may be short because of large results: only an empty one is the last.
        more = await self._store.lines(batch_id, after=after, limit=1, state=state)
        return ReadableLines(data=found, next_after=after if more else None)

    async def errors(self, tenant: str, batch_id: str) -> ErrorGroups:
        """Return the failed lines of a batch by code, as many as can be looked at in one call."""
        batch = await self._jobs.batch(tenant, batch_id)
        found: list[ReadableLine] = []
        after = 0
        while len(found) < _GROUPED_LINES:
            page = await self._store.lines(batch_id, after=after, limit=_PAGE_LINES, state="failed")
            if not page:
                break
            after = page[-1].number
            found += [readable(line, None) for line in page]
        more = await self._store.lines(batch_id, after=after, limit=1, state="failed") if found else []
        groups = groups_of(found)
        examples = {group.example.line for group in groups}
        shown = {
            line.line: line
            for number in examples
            for line in await self._readable(batch, await self._store.lines(batch_id, after=number - 1, limit=1))
        }
        for group in groups:
            group.example = shown.get(group.example.line, group.example)
        return ErrorGroups(data=groups, counted=len(found), has_more=bool(more))

    async def _readable(self, batch: BatchRecord, lines: Sequence[StoredLine]) -> list[ReadableLine]:
        spans = [(line.offset or 0, line.length or 0) for line in lines]
        contents: Sequence[bytes | None]
        try:
            contents = await self._blobs.read_spans(batch.input_file_id, spans) if spans else []
        except (NotFound, InputBroken):
            contents = [None] * len(lines)
        return await off_loop(_all_readable, lines, contents)


def _all_readable(lines: Sequence[StoredLine], contents: Sequence[bytes | None]) -> list[ReadableLine]:
    return [readable(line, content) for line, content in zip(lines, contents, strict=True)]
