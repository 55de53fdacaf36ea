"""`FireworksBatches`: Fireworks' batch inference jobs, which read a dataset and write another.

Based on Fireworks' API reference (create-dataset, upload-dataset-files, create-, get-, list- and
delete-batch-inference-job, get-dataset-download-endpoint at https://docs.fireworks.ai/api-reference) and its guide
(https://docs.fireworks.ai/guides/batch-inference), and on answers that others have observed: results are rows such as
`{"custom_id": …, "response": {"choices": …, "usage": …}}` without a status, `exampleCount` must be given, a GET must
have no body, and the only way to cancel a job is to delete it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from batchwright.errors import EndpointError, InvalidRequest, RunFailed
from batchwright.inference.batches.file_client import FileClient
from batchwright.inference.batches.http_batches import HttpBatches
from batchwright.inference.batches.journal import BatchEntry
from batchwright.inference.batches.json_values import part, result_object, text, time_of
from batchwright.inference.batches.kinds import ProviderKind
from batchwright.inference.batches.provider import LineResult, RemoteBatch, look_up
from batchwright.submitting.endings import Ending, Problem

ACCOUNT_VARIABLE = "FIREWORKS_ACCOUNT_ID"
"""Environment variable with the account, as in Fireworks' own clients."""
_ENDPOINT = "/v1/chat/completions"
_PAGE = 200
_MOST_PAGES = 50
_PREFIX = "batchwright-"
_GONE = 404
_ENDINGS: Mapping[str, Ending] = {
    "completed": "completed",
    "failed": "failed",
    "expired": "expired",
    "early_stopped": "expired",
    "cancelled": "cancelled",
    "deleting": "cancelled",
    "deleting_cleaning_up": "cancelled",
    "deleted": "cancelled",
    "archived": "cancelled",
}
_DELETED = frozenset({"deleting", "deleting_cleaning_up", "deleted", "archived"})
_VALIDATING = frozenset({"unspecified", "validating", "creating_input_dataset"})
_NOT_BEGUN = _VALIDATING | {"pending", "creating"}
_PASSING = frozenset({"INTERNAL", "UNAVAILABLE", "UNKNOWN", "ABORTED", "DEADLINE_EXCEEDED"})
"""Codes of jobs that failed through no fault of their lines."""
_READY_AFTER = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before each check whether an uploaded dataset can be used."""


def control_plane(base_url: str) -> str:
    """Return the address of the API for jobs, given that of the API for requests, `https://HOST/inference/v1`."""
    return base_url.rstrip("/").removesuffix("/v1").removesuffix("/inference") + "/v1"


class FireworksBatches(HttpBatches):
    """Fireworks' batch inference jobs at one endpoint; `account` None stands for the account of the key.

    The id of a job is derived from the uuid of its batch before it is created, so no request creates a second one.
    """

    settles_in = 60.0
    keeps_cancelled = False

    def __init__(self, client: FileClient, kind: ProviderKind, account: str | None) -> None:
        super().__init__(client, kind)
        self._account_id = account

    def line(self, custom_id: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
        if endpoint != _ENDPOINT:
            raise InvalidRequest(
                f"{self.name} computes only {_ENDPOINT} in batches, not {endpoint}: ask for a chat, or with --via live",
                param="url",
            )
        if not body.get("model"):
            raise InvalidRequest(f"a batch of {self.name} needs a model: name one with --model", param="model")
        # The job has the model, not the line.
        return msgspec.json.encode(
            {"custom_id": custom_id, "body": {name: value for name, value in body.items() if name != "model"}}
        )

    async def find_upload(self, entry: BatchEntry) -> str | None:
        # A dataset whose upload was interrupted cannot be told from a complete one.
        return None

    async def upload(self, entry: BatchEntry, path: Path) -> str | None:
        account, dataset = await self._account(), f"{_PREFIX}{uuid4()}"
        described = {"format": "CHAT", "userUploaded": {}, "exampleCount": str(entry.lines)}
        await self._client.post(account, "datasets", body={"datasetId": dataset, "dataset": described})
        await self._client.post_form(
            account, "datasets", f"{dataset}:upload", fields={}, file=path, name=f"{dataset}.jsonl"
        )
        for pause in _READY_AFTER:
            await asyncio.sleep(pause)
            found = await self._client.get(account, "datasets", dataset)
            if isinstance(found, dict) and found.get("state") == "READY":
                return dataset
        raise EndpointError(f"{self.name} has not made the uploaded dataset {dataset} ready")

    async def find(self, entry: BatchEntry, known: Collection[str]) -> RemoteBatch | Literal["unclear"] | None:
        try:
            return await self.show(_job_id(entry.uuid))
        except EndpointError as error:
            if error.status != _GONE:
                raise
            return None

    async def create(self, entry: BatchEntry, path: Path) -> RemoteBatch:
        account = await self._account()
        body = {"model": entry.model, "inputDatasetId": f"{account}/datasets/{entry.file}"}
        query = {"batchInferenceJobId": _job_id(entry.uuid)}
        return _batch(await self._client.post(account, "batchInferenceJobs", body=body, query=query))

    async def look(self, ids: Collection[str]) -> dict[str, RemoteBatch]:
        async def first_page() -> Sequence[RemoteBatch]:
            return (await self._page(None))[0]

        return await look_up(ids, first_page, self.show)

    async def newest(self, limit: int) -> Sequence[RemoteBatch]:
        # The order of the list is not documented.
        found, token = await self._page(None)
        for _ in range(_MOST_PAGES - 1):
            if token is None:
                break
            page, token = await self._page(token)
            found += page
        return sorted(found, key=lambda batch: -(batch.created_at or 0.0))[:limit]

    async def show(self, batch_id: str) -> RemoteBatch:
        return _batch(await self._client.get(await self._account(), "batchInferenceJobs", batch_id))

    async def cancel(self, batch_id: str) -> RemoteBatch:
        before = await self.show(batch_id)
        if before.ending is not None:
            return before
        await self._client.delete(await self._account(), "batchInferenceJobs", batch_id)
        may_have_begun = before.status not in _NOT_BEGUN or before.done > 0
        return replace(before, status="deleting", ending="cancelled", files=(), lost=may_have_begun)

    async def fetch(self, batch: RemoteBatch, target: Path) -> None:
        account = await self._account()
        urls: list[str] = []
        for dataset in batch.files:
            found = await self._client.get(account, "datasets", f"{dataset}:getDownloadEndpoint")
            named = part(found if isinstance(found, dict) else {}, "filenameToSignedUrls")
            urls += [url for _, url in sorted(named.items()) if isinstance(url, str)]
        if batch.files and not urls:
            raise EndpointError("the provider does not say yet where the results are")
        await self._client.download(urls, target)

    def result(self, line: bytes) -> LineResult | None:
        if (value := result_object(line)) is None:
            return None
        custom_id, error = value["custom_id"], value.get("error")
        response = part(value, "response")
        response = part(response, "body") or response
        error = error or response.get("error")
        if error:
            fields = dict(error) if isinstance(error, dict) else {"message": str(error)}
            code = fields.get("code")
            status = code if isinstance(code, int) and not isinstance(code, bool) and code >= 400 else None
            return LineResult(custom_id, status=status, error=fields)
        return LineResult(custom_id, answer=dict(response)) if "choices" in response else LineResult(custom_id)

    async def _account(self) -> str:
        """Return the resource name of the account: the given one, or the only one of the key."""
        if self._account_id is None:
            answer = await self._client.get("accounts", pageSize=2)
            listed = answer.get("accounts") if isinstance(answer, dict) else None
            names = [_last(each.get("name")) for each in listed or () if isinstance(each, dict)]
            if len(names) != 1 or not names[0]:
                raise RunFailed(
                    f"the key belongs to {'several accounts' if names else 'no account'} of {self.name} that can be "
                    f"listed: name the account in {ACCOUNT_VARIABLE}"
                )
            self._account_id = names[0]
        return f"accounts/{self._account_id}"

    async def _page(self, token: str | None) -> tuple[list[RemoteBatch], str | None]:
        account = await self._account()
        answer = await self._client.get(account, "batchInferenceJobs", pageSize=_PAGE, pageToken=token)
        values = answer if isinstance(answer, dict) else {}
        listed = values.get("batchInferenceJobs")
        found = [_batch(each) for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        return found, text(values.get("nextPageToken"))


def _batch(answer: object) -> RemoteBatch:
    values = answer if isinstance(answer, dict) else {}
    job = _last(values.get("name"))
    if not job:
        raise EndpointError("the provider answers without the name of a job")
    status = str(values.get("state") or "unspecified").lower().removeprefix("job_state_")
    progress, reported = part(values, "jobProgress"), part(values, "status")
    succeeded, failed = _number(progress.get("successfullyProcessedRequests")), _number(progress.get("failedRequests"))
    ending, output = _ENDINGS.get(status), _last(values.get("outputDatasetId"))
    # A job that was refused as a whole has no output, and what happens to the output of a deleted one is not
    # documented.
    has_output = bool(output) and status not in _DELETED and (ending != "failed" or succeeded > 0)
    return RemoteBatch(
        id=job,
        status=status,
        ending=ending,
        # The number of the input is the declared one, and 0 before the job runs.
        total=max(_number(progress.get("totalInputRequests")), _number(progress.get("totalProcessedRequests"))),
        succeeded=succeeded,
        failed=failed,
        problems=(_problem(reported),) if ending == "failed" else (),
        files=(output,) if ending is not None and has_output else (),
        created_at=time_of(values.get("createTime")),
        ends_by=time_of(values.get("expireTime")),
        endpoint=_ENDPOINT,
        model=text(values.get("model")),
        mark=job.removeprefix(_PREFIX) if job.startswith(_PREFIX) else None,
        input_file=_last(values.get("inputDatasetId")) or None,
        accepted=status not in _VALIDATING,
        lost=status in _DELETED,
    )


def _problem(status: Mapping[str, Any]) -> Problem:
    """Return why a job failed. The line that its message names is not the one at fault, so none is named."""
    code = text(status.get("code"))
    return Problem(
        "internal_error" if code in _PASSING else code, str(status.get("message") or "the provider gives no reason")
    )


def _job_id(uuid: str) -> str:
    return _PREFIX + uuid


def _last(name: object) -> str:
    """Return the last part of the name of a resource."""
    return name.rpartition("/")[2] if isinstance(name, str) else ""


def _number(value: object) -> int:
    """Return a number of lines, which may be written as a string."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and value > 0 else 0
