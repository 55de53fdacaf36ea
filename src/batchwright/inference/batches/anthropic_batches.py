"""`AnthropicBatches`: Anthropic's Message Batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from batchwright.inference.batches.file_client import FileClient
from batchwright.inference.batches.http_batches import HttpBatches
from batchwright.inference.batches.journal import BatchEntry
from batchwright.inference.batches.json_values import count, data, id_of, part, result_object, text, time_of
from batchwright.inference.batches.kinds import ProviderKind
from batchwright.inference.batches.provider import LineResult, RemoteBatch, look_up
from batchwright.submitting.endings import Ending

HEADERS = {"anthropic-version": "2023-06-01"}
_PATH = "messages/batches"
_MARK_LENGTH = 12
"""Characters of a batch's uuid before the `-` in the custom ids of its lines."""
_PAGE = 1000
_CLOCKS_DIFFER = 3600.0
_PIECE = 2**18
_HEAD, _TAIL = b'{"requests":[', b"]}"


class Translation(Protocol):
    """Translation between OpenAI's bodies and those of Anthropic's Messages."""

    def request(self, endpoint: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of a Messages request. Raises `InvalidRequest` for what has no counterpart."""

    def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return OpenAI's form of a message."""


class AnthropicBatches(HttpBatches):
    """Anthropic's Message Batches at one endpoint.

    There are no metadata and no idempotency keys, so each custom id begins with a part of its batch's uuid. Only the
    results show whether a batch is ours, that is, after it has ended: until then, any batch with the same number of
    lines that was created at the time may be ours.
    """

    settles_in = 300.0

    def __init__(self, client: FileClient, kind: ProviderKind, translation: Translation) -> None:
        super().__init__(client, kind)
        self._translation = translation
        self._not_ours: dict[str, set[str]] = {}
        """Ids of ended batches whose results were checked, by the uuid of the batch that they turned out not to be."""

    def custom_id(self, uuid: str, name: str) -> str:
        return f"{_mark(uuid)}-{name}"

    def line_name(self, custom_id: str) -> str:
        return custom_id.partition("-")[2]

    def line(self, custom_id: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({"custom_id": custom_id, "params": self._translation.request(endpoint, body)})

    async def find_upload(self, entry: BatchEntry) -> str | None:
        return None

    async def upload(self, entry: BatchEntry, path: Path) -> str | None:
        return None

    async def find(self, entry: BatchEntry, known: Collection[str]) -> RemoteBatch | Literal["unclear"] | None:
        since = (entry.attempted_at or 0.0) - _CLOCKS_DIFFER
        others = self._not_ours.setdefault(entry.uuid, set())
        unclear = False
        for batch in await self._page(_PAGE, None):
            if batch.id in known or batch.id in others or batch.total != entry.lines:
                continue
            if (batch.created_at or since) < since:
                continue
            # Where its results are may be said a little after its end; without a success nothing is paid twice.
            if batch.ending is None or (batch.succeeded and not batch.files and not batch.lost):
                unclear = True
            elif batch.files and await self._is_marked(batch, _mark(entry.uuid)):
                return batch
            else:
                others.add(batch.id)
        return "unclear" if unclear else None

    async def create(self, entry: BatchEntry, path: Path) -> RemoteBatch:
        size = (await asyncio.to_thread(path.stat)).st_size
        # The last newline is not replaced by a comma.
        whole = len(_HEAD) + size - 1 + len(_TAIL)
        return self._batch(await self._client.post_pieces(_PATH, pieces=_requests(path, size), size=whole))

    async def look(self, ids: Collection[str]) -> dict[str, RemoteBatch]:
        return await look_up(ids, lambda: self._page(_PAGE, None), self.show)

    async def newest(self, limit: int) -> Sequence[RemoteBatch]:
        found: list[RemoteBatch] = []
        while len(found) < limit:
            page = await self._page(min(_PAGE, limit - len(found)), found[-1].id if found else None)
            found += page
            if not page:
                break
        return found

    async def show(self, batch_id: str) -> RemoteBatch:
        return self._batch(await self._client.get(_PATH, batch_id))

    async def cancel(self, batch_id: str) -> RemoteBatch:
        return self._batch(await self._client.post(_PATH, batch_id, "cancel"))

    async def fetch(self, batch: RemoteBatch, target: Path) -> None:
        await self._client.download([f"/{_PATH}/{batch.id}/results"] if batch.files else [], target)

    def result(self, line: bytes) -> LineResult | None:
        if (value := result_object(line)) is None:
            return None
        custom_id, result = value["custom_id"], part(value, "result")
        message = part(result, "message")
        if result.get("type") == "succeeded" and message:
            return LineResult(custom_id, answer=self._translation.answer(_CHAT, message))
        if result.get("type") == "errored":
            error = part(result, "error")
            error = part(error, "error") or error
            kind = text(error.get("type"))
            return LineResult(
                custom_id,
                status=_STATUSES.get(kind or ""),
                error={"code": kind, "message": error.get("message") or "no reason given"},
            )
        return LineResult(custom_id)

    async def _is_marked(self, batch: RemoteBatch, mark: str) -> bool:
        """Whether the results of an ended batch have custom ids that begin with `mark`."""
        first = self.result(await self._client.first_line(f"/{_PATH}/{batch.id}/results"))
        return first is not None and first.custom_id.startswith(f"{mark}-")

    async def _page(self, limit: int, after: str | None) -> list[RemoteBatch]:
        return [self._batch(each) for each in data(await self._client.get(_PATH, limit=limit, after_id=after))]

    def _batch(self, answer: object) -> RemoteBatch:
        values = answer if isinstance(answer, dict) else {}
        counts = {name: count(number) for name, number in part(values, "request_counts").items()}
        status = str(values.get("processing_status") or "")
        # The results of an archived batch are no longer available.
        is_archived = values.get("archived_at") is not None
        results = None if is_archived else text(values.get("results_url"))
        return RemoteBatch(
            id=id_of(values, "a batch"),
            status=status,
            ending=_ending(counts) if status == "ended" else None,
            total=sum(counts.values()),
            succeeded=counts.get("succeeded", 0),
            failed=counts.get("errored", 0),
            files=() if results is None else (results,),
            created_at=time_of(values.get("created_at")),
            ends_by=time_of(values.get("expires_at")),
            endpoint="/v1/messages",
            lost=is_archived,
        )


_CHAT = "/v1/chat/completions"
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def _ending(counts: Mapping[str, int]) -> Ending:
    if counts.get("canceled"):
        return "cancelled"
    return "expired" if counts.get("expired") else "completed"


def _mark(uuid: str) -> str:
    return uuid.replace("-", "")[:_MARK_LENGTH]


async def _requests(path: Path, size: int) -> AsyncIterator[bytes]:
    """Yield the body of a request to create a batch of the lines in a file of `size` bytes."""
    yield _HEAD
    left = size - 1
    with path.open("rb") as file:
        while left:
            piece = await asyncio.to_thread(file.read, min(_PIECE, left))
            if not piece:
                raise OSError(f"{path} has become shorter")
            left -= len(piece)
            # Within a line of JSON a newline is always written as \n.
            yield piece.replace(b"\n", b",")
    yield _TAIL
