"""`EarlierLines`: lines of earlier runs that are in batches, or have results, and that no caller has asked for yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from batchwright.inference.batches.held import OpenBatch
from batchwright.inference.batches.journal import BatchEntry, Journal
from batchwright.inference.batches.provider import BatchProvider, LineResult
from batchwright.inference.batches.results_file import custom_ids, read_at, results_in

_Place: TypeAlias = "OpenBatch | tuple[str, int, int]"
"""The batch of a line; or the uuid of the batch that has its result, with the result's offset and size there."""


class EarlierLines:
    """Locations, by name, of lines that earlier runs submitted or that their callers gave up.

    `is_finished` tells for a name whether its line needs no result any more; `forgets_failures`: errors that earlier
    runs collected do not count.
    """

    def __init__(
        self,
        provider: BatchProvider,
        journal: Journal,
        *,
        is_finished: Callable[[str], bool],
        forgets_failures: bool,
    ) -> None:
        self._provider = provider
        self._journal = journal
        self._is_finished = is_finished
        self._forgets_failures = forgets_failures
        self._places: dict[str, _Place] = {}

    def recall(self, entry: BatchEntry) -> OpenBatch | None:
        """Record the lines of a batch of earlier runs, and return it if it is not collected yet. Raises OSError.

        Called in the order of the journal, since a later batch of a line overrides an earlier one.
        """
        if entry.stage == "dropped":
            return None
        if entry.stage == "collected":
            self._recall_results(entry)
            return None
        batch = OpenBatch(entry)
        for custom_id in custom_ids(self._journal.input_path(entry.uuid)):
            name = self._provider.line_name(custom_id)
            if not self._is_finished(name):
                self._places[name] = batch
        return batch

    def _recall_results(self, entry: BatchEntry) -> None:
        path = self._journal.results_path(entry.uuid)
        for result, offset, size in results_in(path, self._provider.result) if path.exists() else ():
            name = self._provider.line_name(result.custom_id)
            forgotten = self._forgets_failures and result.answer is None
            if result.computed and not forgotten and not self._is_finished(name):
                self._places[name] = (entry.uuid, offset, size)
            else:
                self._places.pop(name, None)

    def take(self, name: str) -> OpenBatch | LineResult | None:
        """Return the batch of a line, or its result, and forget it; None if it is not known. Raises OSError."""
        place = self._places.pop(name, None)
        if place is None or isinstance(place, OpenBatch):
            return place
        uuid, offset, size = place
        return self._provider.result(read_at(self._journal.results_path(uuid), offset, size))

    def has_result_of(self, name: str) -> bool:
        """Whether the result of a line is here."""
        return isinstance(self._places.get(name), tuple)

    def put(self, name: str, batch: OpenBatch) -> None:
        """Record a line that its caller has given up."""
        self._places[name] = batch

    def has_result(self, name: str, batch: OpenBatch, offset: int, size: int) -> None:
        """Record where the result of a line is, if no caller has asked for it yet."""
        if self._places.get(name) is batch:
            self._places[name] = (batch.entry.uuid, offset, size)

    def forget(self, batch: OpenBatch) -> None:
        """Forget those lines of a batch that have no result."""
        self._places = {name: place for name, place in self._places.items() if place is not batch}
