"""`OpenAIBatches`: OpenAI's Files and Batches, and those of all compatible providers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from batchwright.inference.batches.http_batches import HttpBatches
from batchwright.inference.batches.journal import BatchEntry
from batchwright.inference.batches.json_values import count, data, id_of, part, result_object, text, time_of
from batchwright.inference.batches.provider import LineResult, RemoteBatch, look_up
from batchwright.submitting.endings import Ending, Problem

_PAGE = 100
_CLOCKS_DIFFER = 3600.0
"""Seconds by which the provider's clock may be behind ours."""
_OK = 200
MARK = "batchwright"
"""Key of a batch's metadata with the uuid that we gave it."""
_ENDINGS: Mapping[str, Ending] = {
    "completed": "completed",
    "complete": "completed",
    "success": "completed",
    "failed": "failed",
    "expired": "expired",
    "timeout_exceeded": "expired",
    "cancelled": "cancelled",
    "canceled": "cancelled",
}
_VALIDATING = frozenset({"validating", "queued"})
_NOT_COMPUTED = frozenset({"batch_expired", "batch_cancelled", "batch_canceled"})
"""Codes of lines that were not computed before their batch ended."""


class OpenAIBatches(HttpBatches):
    """OpenAI's Files and Batches at one endpoint.

    A batch has its uuid in its metadata and in the name of its input file; the input file belongs to no other batch, so
    that the batch can be found by it even where metadata are not kept.
    """

    settles_in = 60.0

    def line(self, custom_id: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode(
            {"custom_id": custom_id, "method": "POST", "url": self._theirs(endpoint), "body": body}
        )

    async def find_upload(self, entry: BatchEntry) -> str | None:
        listed = data(await self._client.get("files", purpose=self._kind.purpose, limit=_PAGE))
        name = _file_name(entry)
        for file in listed:
            # A provider may have kept a part of an interrupted upload.
            if file.get("filename") == name and file.get("bytes") in (None, entry.size):
                return id_of(file, "a file")
        return None

    async def upload(self, entry: BatchEntry, path: Path) -> str | None:
        name = _file_name(entry)
        fields = {"purpose": self._kind.purpose}
        if self._kind.upload_path != "/files":
            fields |= {"file_name": name, "file_type": "jsonl"}
        answer = await self._client.post_form(self._kind.upload_path, fields=fields, file=path, name=name)
        return id_of(answer, "a file")

    async def find(self, entry: BatchEntry, known: Collection[str]) -> RemoteBatch | Literal["unclear"] | None:
        since = (entry.attempted_at or 0.0) - _CLOCKS_DIFFER
        after: str | None = None
        while True:
            page = await self._page(_PAGE, after)
            for batch in page:
                if batch.mark == entry.uuid or (entry.file is not None and batch.input_file == entry.file):
                    return batch
            # The newest come first, so what follows was created earlier.
            if len(page) < _PAGE or page[-1].id == after or (page[-1].created_at or since) < since:
                return None
            after = page[-1].id

    async def create(self, entry: BatchEntry, path: Path) -> RemoteBatch:
        body = self._request(entry)
        return self._batch(await self._client.post(self._batches, body=body, headers={"idempotency-key": entry.uuid}))

    async def look(self, ids: Collection[str]) -> dict[str, RemoteBatch]:
        return await look_up(ids, lambda: self._page(_PAGE, None), self.show)

    async def newest(self, limit: int) -> Sequence[RemoteBatch]:
        found: list[RemoteBatch] = []
        after: str | None = None
        while len(found) < limit:
            page = await self._page(min(_PAGE, limit - len(found)), after)
            found += page
            if not page or page[-1].id == after:
                break
            after = page[-1].id
        return found

    async def show(self, batch_id: str) -> RemoteBatch:
        return self._batch(await self._client.get(self._batches, batch_id))

    async def cancel(self, batch_id: str) -> RemoteBatch:
        return self._batch(await self._client.post(self._batches, batch_id, "cancel"))

    async def fetch(self, batch: RemoteBatch, target: Path) -> None:
        await self._client.download([f"/files/{file}/content" for file in batch.files], target)

    def result(self, line: bytes) -> LineResult | None:
        if (value := result_object(line)) is None:
            return None
        custom_id = value["custom_id"]
        response, error = part(value, "response"), value.get("error")
        status, body = response.get("status_code", _OK), response.get("body")
        if status == _OK and isinstance(body, dict) and not error:
            return LineResult(custom_id, answer=body)
        reported = part(body, "error") if isinstance(body, dict) else {}
        reported = reported or (error if isinstance(error, dict) else {"message": str(error)} if error else {})
        if text(reported.get("code")) in _NOT_COMPUTED:
            return LineResult(custom_id)
        if not reported and not response:
            return LineResult(custom_id)
        code = status if isinstance(status, int) and status != _OK else None
        return LineResult(
            custom_id, status=code, error=dict(reported) or {"message": f"the line failed with status {status}"}
        )

    @property
    def _batches(self) -> str:
        return "batches"

    def _theirs(self, endpoint: str) -> str:
        return endpoint.removeprefix("/v1") if self._kind.strips_version else endpoint

    def _request(self, entry: BatchEntry) -> dict[str, Any]:
        """Return the body of the request that creates a batch."""
        body = {
            "input_file_id": entry.file,
            "endpoint": self._theirs(entry.endpoint),
            "completion_window": entry.window,
        }
        return body | ({"metadata": {MARK: entry.uuid}} if self._kind.has_metadata else {})

    async def _page(self, limit: int, after: str | None) -> list[RemoteBatch]:
        answer = await self._client.get(self._batches, limit=limit, after=after)
        return [self._batch(each) for each in data(answer)]

    def _batch(self, answer: object) -> RemoteBatch:
        values = answer.get("job", answer) if isinstance(answer, dict) else {}
        if not isinstance(values, dict):
            values = {}
        counts = part(values, "request_counts")
        status = str(values.get("status") or "").lower()
        files = [values.get(name) for name in ("output_file_id", "error_file_id")]
        return RemoteBatch(
            id=id_of(values, "a batch"),
            status=status,
            ending=_ENDINGS.get(status),
            total=count(counts.get("total")),
            succeeded=count(counts.get("completed")),
            failed=count(counts.get("failed")),
            problems=_problems(values),
            files=tuple(file for file in files if isinstance(file, str) and file),
            created_at=time_of(values.get("created_at")),
            ends_by=time_of(values.get("expires_at", values.get("job_deadline"))),
            endpoint=text(values.get("endpoint")),
            model=text(values.get("model", values.get("model_id"))),
            mark=text(part(values, "metadata").get(MARK)),
            input_file=text(values.get("input_file_id")),
            accepted=status not in _VALIDATING,
        )


class MistralBatches(OpenAIBatches):
    """Mistral's batch jobs, which differ in paths and names of fields."""

    @property
    def _batches(self) -> str:
        return "batch/jobs"

    def line(self, custom_id: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
        return msgspec.json.encode({"custom_id": custom_id, "body": body})

    def _request(self, entry: BatchEntry) -> dict[str, Any]:
        return {
            "input_files": [entry.file],
            "endpoint": entry.endpoint,
            "model": entry.model,
            "timeout_hours": _hours(entry.window),
            "metadata": {MARK: entry.uuid},
        }

    async def _page(self, limit: int, after: str | None) -> list[RemoteBatch]:
        # Pages are numbered here: `after` is the id of the last batch seen, so continue from its position.
        found: list[RemoteBatch] = []
        for page in range(100):
            answer = await self._client.get(self._batches, page=page, page_size=_PAGE)
            batches = [self._batch(each) for each in data(answer)]
            found += batches
            if after is None or any(batch.id == after for batch in batches) or len(batches) < _PAGE:
                break
        at = next((index for index, batch in enumerate(found) if batch.id == after), -1)
        return found[at + 1 :][:limit]

    def _batch(self, answer: object) -> RemoteBatch:
        values = answer if isinstance(answer, dict) else {}
        inputs = values.get("input_files")
        translated = {
            **values,
            "request_counts": {
                "total": values.get("total_requests"),
                "completed": values.get("succeeded_requests"),
                "failed": values.get("failed_requests"),
            },
            "output_file_id": values.get("output_file"),
            "error_file_id": values.get("error_file"),
            "input_file_id": inputs[0] if isinstance(inputs, list) and inputs else None,
        }
        return super()._batch(translated)


def _hours(window: str) -> int:
    number, unit = int(window[:-1]), window[-1]
    return max(1, round(number * {"s": 1 / 3600, "m": 1 / 60, "h": 1, "d": 24}[unit]))


def _file_name(entry: BatchEntry) -> str:
    return f"batchwright-{entry.uuid}.jsonl"


def _problems(values: Mapping[str, Any]) -> tuple[Problem, ...]:
    errors = values.get("errors") or values.get("error")
    found = errors.get("data", [errors]) if isinstance(errors, dict) else errors
    if isinstance(found, str):
        found = [{"message": found}]
    return tuple(
        Problem(
            text(each.get("code")),
            str(each.get("message") or "no reason given"),
            each["line"] if isinstance(each.get("line"), int) else None,
        )
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, dict)
    )
