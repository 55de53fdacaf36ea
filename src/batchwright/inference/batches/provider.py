"""`BatchProvider`: the batch API of a provider, to the extent that batchwright needs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from batchwright.errors import EndpointError
from batchwright.inference.batches.journal import BatchEntry
from batchwright.submitting.drafts import BatchLimits
from batchwright.submitting.endings import Ending, Problem

_FEW = 3
"""Most batches that are requested one by one, without the list."""
_GONE = 404
NO_SUCH_API = frozenset({404, 405, 501})
"""Statuses with which an endpoint without batches answers."""


@dataclass(frozen=True, slots=True)
class RemoteBatch:
    """A batch as its provider describes it."""

    id: str
    status: str
    """The provider's own word for it."""
    ending: Ending | None = None
    """How it ended; None while it is being computed."""
    total: int = 0
    """Lines; 0 while the provider has not counted them."""
    succeeded: int = 0
    failed: int = 0
    problems: tuple[Problem, ...] = ()
    files: tuple[str, ...] = ()
    """Files from which its results are fetched."""
    created_at: float | None = None
    """Unix time."""
    ends_by: float | None = None
    """Unix time at which it expires."""
    endpoint: str | None = None
    model: str | None = None
    mark: str | None = None
    """The uuid that batchwright gave it; None if the provider does not keep it, or the batch is someone else's."""
    input_file: str | None = None
    accepted: bool = True
    """Whether the provider has checked its input."""
    lost: bool = False
    """Whether results that it may have had, and that would be charged, are gone with it."""

    @property
    def done(self) -> int:
        """Lines with a result."""
        return self.succeeded + self.failed


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of one line of a batch: an answer, an error, or neither if the line was not computed."""

    custom_id: str
    answer: dict[str, Any] | None = None
    status: int | None = None
    """HTTP status of the error."""
    error: dict[str, Any] | None = None

    @property
    def computed(self) -> bool:
        """Whether there is an answer or an error of the line itself."""
        return self.answer is not None or self.error is not None


class BatchProvider(Protocol):
    """A provider's batch API. All methods raise `EndpointError` if they fail, and none retries."""

    name: str
    limits: BatchLimits
    settles_in: float
    """Seconds after a request to create a batch within which that batch is listed if it exists."""
    keeps_cancelled: bool = True
    """Whether a cancelled batch keeps the results that it has."""

    def custom_id(self, uuid: str, name: str) -> str:
        """Return the custom id of the line `name` (letters, digits, `_`, `-`; at most 48) in the batch `uuid`."""

    def line_name(self, custom_id: str) -> str:
        """Return the `name` from which `custom_id` was made."""

    def line(self, custom_id: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
        """Return a line of an input file, without its newline. Raises `InvalidRequest`."""

    async def find_upload(self, entry: BatchEntry) -> str | None:
        """Return the id of the uploaded input file of a batch, if it exists."""

    async def upload(self, entry: BatchEntry, path: Path) -> str | None:
        """Upload the input file of a batch, and return its id; None if files are sent with the batch itself."""

    async def find(self, entry: BatchEntry, known: Collection[str]) -> RemoteBatch | Literal["unclear"] | None:
        """Return the batch that an earlier request created, if it did.

        `known`: ids of batches that are known to be different. "unclear": a batch still being computed may be the one.
        """

    async def create(self, entry: BatchEntry, path: Path) -> RemoteBatch:
        """Create a batch of the uploaded file, or of the file at `path`."""

    async def look(self, ids: Collection[str]) -> dict[str, RemoteBatch]:
        """Return these batches as they are now, except those that are gone, with as few requests as possible."""

    async def newest(self, limit: int) -> Sequence[RemoteBatch]:
        """Return up to `limit` batches, the newest first."""

    async def show(self, batch_id: str) -> RemoteBatch:
        """Return one batch."""

    async def cancel(self, batch_id: str) -> RemoteBatch:
        """Cancel a batch; the results that it has are kept if `keeps_cancelled`. Returns its state afterwards."""

    async def fetch(self, batch: RemoteBatch, target: Path) -> None:
        """Write all results of an ended batch to `target`, one line each, either completely or not at all."""

    def result(self, line: bytes) -> LineResult | None:
        """Return the result in one line; None if the line is not a result."""

    async def close(self) -> None:
        """Close its connections."""


async def look_up(
    ids: Collection[str],
    first_page: Callable[[], Awaitable[Sequence[RemoteBatch]]],
    show: Callable[[str], Awaitable[RemoteBatch]],
) -> dict[str, RemoteBatch]:
    """Return the batches `ids` that exist, from the first page of the list if they are many, else one by one.

    Raises `EndpointError` for any failure except a 404.
    """
    found: dict[str, RemoteBatch] = {}
    if len(ids) > _FEW:
        found = {batch.id: batch for batch in await first_page() if batch.id in ids}
    for batch_id in ids:
        if batch_id not in found:
            try:
                found[batch_id] = await show(batch_id)
            except EndpointError as error:
                if error.status != _GONE:
                    raise
    return found
