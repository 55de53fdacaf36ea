"""Fireworks' batch inference jobs on loopback, with the ledger of `batch_provider`.

Built from https://docs.fireworks.ai/api-reference (accounts, datasets, batchInferenceJobs), its official client
(https://github.com/fw-ai-external/python-sdk) and https://docs.fireworks.ai/guides/batch-inference. What these leave
open is as others have seen it: rows of results have no status, a GET with a body is refused, a dataset needs its
`exampleCount`, a bad row fails its job, and a job that is deleted takes its results along.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from tests.inference.batch_provider import Batch, BatchHandler, BatchServer

ACCOUNT = "acme"
_STEPS = (
    (r"GET signed/.*", "content"),
    (r"GET models", "models"),
    (r"GET accounts", "list_accounts"),
    (r"POST accounts/\w+/datasets", "dataset"),
    (r"POST accounts/\w+/datasets/[\w-]+:upload", "upload"),
    (r"GET accounts/\w+/datasets/[\w-]+:getDownloadEndpoint", "results"),
    (r"GET accounts/\w+/datasets/[\w-]+", "ready"),
    (r"POST accounts/\w+/batchInferenceJobs", "create"),
    (r"GET accounts/\w+/batchInferenceJobs", "list_batches"),
    (r"GET accounts/\w+/batchInferenceJobs/[\w-]+", "retrieve"),
    (r"DELETE accounts/\w+/batchInferenceJobs/[\w-]+", "cancel"),
)
_STATES = {
    "validating": "VALIDATING",
    "in_progress": "RUNNING",
    "cancelling": "DELETING_CLEANING_UP",
    "completed": "COMPLETED",
    "expired": "EXPIRED",
    "failed": "FAILED",
}


class FireworksServer(BatchServer):
    """The provider. `datasets` are the lines of each, None before they are uploaded."""

    def __init__(self) -> None:
        super().__init__(FireworksHandler)
        self.datasets: dict[str, list[dict[str, Any]] | None] = {}
        self.accounts = [ACCOUNT]
        self.unlisted = 0
        """Times that the addresses of results are asked for before they are there."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/inference/v1"

    def end(self, batch: Batch, status: str) -> None:
        if status == "cancelled":
            del self.batches[batch.id]
            return
        # Rows that were not computed are in no file.
        batch.status = status

    def advance(self) -> None:
        for batch in [*self.batches.values()]:
            if batch.status == "cancelling":
                self.end(batch, "cancelled")
        super().advance()


class FireworksHandler(BatchHandler):
    server: FireworksServer

    def do_DELETE(self) -> None:  # noqa: N802 - the name in the base class
        self.handle_step(b"")

    def parts(self, path: str) -> list[str]:
        return path.removeprefix("/inference").removeprefix("/v1").removeprefix("/").split("/")

    def step(self, parts: list[str]) -> str:
        if self.command == "GET" and int(self.headers.get("content-length") or 0):
            raise AssertionError("a GET with a body")
        asked = f"{self.command} {'/'.join(parts)}"
        step = next((step for pattern, step in _STEPS if re.fullmatch(pattern, asked)), "live")
        assert step != "content" or "authorization" not in self.headers, "a key for storage"
        return step

    def list_accounts(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        return 200, {"accounts": [{"name": f"accounts/{each}"} for each in self.server.accounts], "nextPageToken": ""}

    def dataset(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        asked = json.loads(body)
        if not int(asked["dataset"].get("exampleCount") or 0):
            return _refusal(400, 3, "example_count is required for uploaded datasets")
        if asked["datasetId"] in self.server.datasets:
            return _refusal(409, 6, "the dataset exists")
        self.server.datasets[asked["datasetId"]] = None
        return 200, {"name": f"accounts/{ACCOUNT}/datasets/{asked['datasetId']}", "state": "UPLOADING"}

    def upload(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        name, content = self.form(body)["file"]
        dataset = parts[-1].removesuffix(":upload")
        self.server.datasets[dataset] = [json.loads(line) for line in content.splitlines()]
        return 200, {"id": dataset, "object": "file", "filename": name, "bytes": len(content), "purpose": "dataset"}

    def ready(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        state = "UPLOADING" if self.server.datasets[parts[-1]] is None else "READY"
        return 200, {"name": "/".join(parts), "state": state}

    def create(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        asked, job = json.loads(body), query["batchInferenceJobId"]
        if job in self.server.batches:
            return _refusal(409, 6, f"job {job} already exists")
        lines = self.server.datasets[asked["inputDatasetId"].removeprefix(f"accounts/{ACCOUNT}/datasets/")]
        assert lines is not None
        assert all(line.keys() == {"custom_id", "body"} and "model" not in line["body"] for line in lines)
        lines = [{**line, "body": {**line["body"], "model": asked["model"]}} for line in lines]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        batch = Batch(job, lines, time.time(), file=asked["inputDatasetId"], status="validating")
        self.server.batches[job] = batch
        return 200, self.shown(batch, False)

    def list_batches(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        self.server.advance()
        at, size = int(query.get("pageToken", "0")), int(query["pageSize"])
        listed = [*self.server.batches.values()]
        more = str(at + size) if at + size < len(listed) else ""
        return 200, {
            "batchInferenceJobs": [self.shown(batch, False) for batch in listed[at : at + size]],
            "nextPageToken": more,
        }

    def retrieve(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        self.server.advance()
        batch = self.server.batches.get(parts[-1])
        return _refusal(404, 5, "resource not found") if batch is None else (200, self.shown(batch, False))

    def cancel(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        if parts[-1] not in self.server.batches:
            return _refusal(404, 5, "resource not found")
        self.server.batches[parts[-1]].status = "cancelling"
        return 200, {}

    def results(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        job = parts[-1].removesuffix(":getDownloadEndpoint").removeprefix("out-")
        batch = self.server.batches.get(job)
        if batch is None or batch.status not in ("completed", "expired"):
            return _refusal(404, 5, "resource not found")
        if self.server.unlisted:
            self.server.unlisted -= 1
            return 200, {"filenameToSignedUrls": {}}
        there = f"http://localhost:{self.server.server_port}/signed/{job}"
        return 200, {
            "filenameToSignedUrls": {
                f"dataset/out-{job}/BIJOutputSet.jsonl": f"{there}/output?X-Goog-Signature=a%2Fb",
                f"dataset/out-{job}/error-data": f"{there}/errors?X-Goog-Signature=a%2Fb",
            }
        }

    def content(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        assert query == {"X-Goog-Signature": "a/b"}
        batch = self.server.batches[parts[1]]
        if parts[2] == "errors":
            rows = [
                {"custom_id": line["custom_id"], "error": line["response"]["body"]["error"]} for line in batch.failed
            ]
        else:
            rows = [
                {"custom_id": line["custom_id"], "response": line["response"]["body"]} for line in batch.output[::-1]
            ]
        return 200, "\n".join(map(json.dumps, rows)).encode()

    def shown(self, batch: Batch, anthropic: bool) -> dict[str, Any]:
        # A batch that was refused names the first line of many that its message blames.
        told = {"code": "OK", "message": ""}
        if batch.errors:
            told = {"code": "INVALID_ARGUMENT", "message": f"Dataset has a syntax error: {batch.errors[0]['message']}"}
        begun = batch.status not in ("validating", "cancelling")
        progress = {
            "totalInputRequests": len(batch.lines),
            "totalProcessedRequests": batch.done,
            "successfullyProcessedRequests": len(batch.output),
            "failedRequests": len(batch.failed),
        }
        return {
            "name": f"accounts/{ACCOUNT}/batchInferenceJobs/{batch.id}",
            "createTime": time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime(batch.created_at)),
            "state": f"JOB_STATE_{_STATES[batch.status]}",
            "status": told,
            "model": batch.lines[0]["body"]["model"],
            "inputDatasetId": batch.file,
            "outputDatasetId": f"accounts/{ACCOUNT}/datasets/out-{batch.id}",
            "jobProgress": progress if begun else None,
        }


def _refusal(status: int, code: int, message: str) -> tuple[int, Any]:
    return status, {"code": code, "message": message, "details": []}
