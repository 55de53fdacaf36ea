"""`Submitter`: submits a sealed batch to its provider exactly once, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from batchwright.errors import EndpointError
from batchwright.inference.batches.held import OpenBatch
from batchwright.inference.batches.journal import Journal
from batchwright.inference.batches.provider import BatchProvider, RemoteBatch
from batchwright.submitting.enqueueing import is_enqueued_limit

_UNCLEAR_STATUSES = frozenset({408, 409, 425})
"""Statuses below 500 that leave open whether a request was carried out."""
_NEVER_CARRIED_OUT = frozenset({501})


class Refused(Exception):
    """The provider does not accept a batch: `error` says why. `is_full`: it would if less were enqueued."""

    def __init__(self, error: EndpointError, *, is_full: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_full = is_full


class Submitter:
    """Uploads and creates batches. Each action is written to the journal before it is carried out.

    A request to create a batch is never simply repeated: if it is not known whether it was carried out, the batch is
    searched for at the provider, until it is found or the provider would list it if it existed.
    """

    def __init__(
        self, provider: BatchProvider, journal: Journal, *, settles_in: float, unix_time: Callable[[], float]
    ) -> None:
        self._provider = provider
        self._journal = journal
        self._settles_in = settles_in
        self._unix_time = unix_time

    async def submit(self, batch: OpenBatch, known: Collection[str]) -> RemoteBatch | None:
        """Submit a batch, as far as that is possible now; None if it is not known yet whether the provider has it.

        `known`: ids of the batches that are known to be different.

        Raises `Refused`, `EndpointError` if it must be retried, and OSError.
        """
        if batch.entry.stage == "creating":
            found = await self._provider.find(batch.entry, known)
            if isinstance(found, RemoteBatch):
                self._note(batch, stage="created", remote=found.id)
                return found
            since = self._unix_time() - (batch.entry.attempted_at or 0.0)
            # A clock that was set back must not make it wait forever.
            if found == "unclear" or 0 <= since < self._settles_in:
                return None
            self._note(batch, stage="uploaded")
        if batch.entry.stage != "uploaded":
            await self._upload(batch)
        return await self._create(batch)

    async def _upload(self, batch: OpenBatch) -> None:
        entry = batch.entry
        found = await self._provider.find_upload(entry) if entry.stage == "uploading" else None
        if found is None:
            self._note(batch, stage="uploading")
            try:
                found = await self._provider.upload(entry, self._journal.input_path(entry.uuid))
            except EndpointError as error:
                if is_final(error):
                    raise Refused(error) from error
                raise
        self._note(batch, stage="uploaded", file=found)

    async def _create(self, batch: OpenBatch) -> RemoteBatch:
        self._note(batch, stage="creating", attempted_at=self._unix_time())
        entry = batch.entry
        try:
            remote = await self._provider.create(entry, self._journal.input_path(entry.uuid))
        except EndpointError as error:
            if not _was_not_carried_out(error):
                raise
            self._note(batch, stage="uploaded")
            body = error.body or {}
            if is_enqueued_limit(body.get("code"), body.get("message") or error):
                raise Refused(error, is_full=True) from error
            if is_final(error):
                raise Refused(error) from error
            raise
        self._note(batch, stage="created", remote=remote.id)
        return remote

    def _note(self, batch: OpenBatch, **changes: object) -> None:
        batch.entry = msgspec.structs.replace(batch.entry, **changes)
        self._journal.note(batch.entry)


def _was_not_carried_out(error: EndpointError) -> bool:
    """Whether the provider certainly refused a request."""
    refused = error.status is not None and 400 <= error.status < 500 and error.status not in _UNCLEAR_STATUSES
    return refused or error.status in _NEVER_CARRIED_OUT


def is_final(error: EndpointError) -> bool:
    """Whether the same request would be refused again, through its own fault."""
    return not error.may_pass and not concerns_all(error) and error.status is not None


def concerns_all(error: EndpointError) -> bool:
    """Whether no request can succeed until someone fixes something, such as a key or a bill."""
    return error.status in (401, 403) or error.is_out_of_quota
