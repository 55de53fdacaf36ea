"""Work for the service, by clients that try again until they are answered; and whether all of it came out right."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import httpx
from tests.crash.models import CHAT, ENDPOINTS, Model, Oracle
from tests.crash.outside import FAILING, Outside

_ENDED = ("completed", "failed", "cancelled", "expired")
_PAUSE = 0.05
_READ = 0.5
"""Share of the undisturbed batches whose results are read while they come."""


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    while not condition():  # noqa: ASYNC110  (another process changes it)
        await asyncio.sleep(_PAUSE)


Fate = Literal["left alone", "cancelled", "paused", "invalid", "retried"]


@dataclass
class Job:
    """A batch that was asked for."""

    questions: dict[str, str]
    """By custom_id."""
    fate: Fate
    endpoint: str = CHAT
    batch_id: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    results: list[dict[str, Any]] | None = None
    """As they were read while it ran, in their order, where somebody read them."""
    results_read: int = 0
    """Where to read on."""
    cleared: bool = False
    """Its output was deleted, after it was found right."""


class Client:
    """Repeats each call until there is an answer: the server may be gone at any moment."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`key`: of the API; None where the service wants none."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, timeout=30, headers=headers)
        self.calls = 0
        """Tries, the unanswered ones too."""
        self.refused = 0
        """Tries that were answered with 429."""

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        while True:
            self.calls += 1
            try:
                response = await self._http.request(method, path, **options)
            except httpx.HTTPError:
                await asyncio.sleep(_PAUSE)
                continue
            self.refused += response.status_code == httpx.codes.TOO_MANY_REQUESTS
            if response.status_code < 500 and response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return response
            await asyncio.sleep(_PAUSE)

    async def json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Raises `AssertionError` for an answer that is an error."""
        response = await self.call(method, path, **options)
        assert response.status_code == 200, f"{method} {path}: {response.status_code} {response.text}"
        answer: dict[str, Any] = response.json()
        return answer

    async def close(self) -> None:
        await self._http.aclose()


class Load:
    """Keeps a few batches going; `finish` waits for all of them."""

    def __init__(
        self,
        client: Client,
        seed: int,
        together: int = 3,
        *,
        model: Model | None = None,
        most_lines: int = 200,
        cleared: float = 0.0,
        limited: bool = False,
    ) -> None:
        """`together`: customers. `cleared`: the share of batches whose output is deleted when it has been checked.

        `limited`: the tenant has quotas of storage and of what is enqueued.
        """
        self._client = client
        self._random = random.Random(seed)
        self._together = together
        self._model = model or Oracle()
        self._most_lines = most_lines
        self._cleared = cleared
        self._limited = limited
        self._stopping = False
        self.jobs: list[Job] = []
        self.ended = 0

    async def run(self) -> None:
        """Until `finish`, or the first wrong answer."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._together):
                group.create_task(self._customer())

    async def more_ends(self, count: int) -> None:
        """Wait until so many more batches have ended."""
        goal = self.ended + count
        await eventually(lambda: self.ended >= goal)

    def finish(self) -> None:
        """No new batches; `run` ends when those that there are have ended."""
        self._stopping = True

    @asynccontextmanager
    async def waiting_batch(self, outside: Outside) -> AsyncIterator[None]:
        """One that lacks an answer, the last line's, while the context lasts, and has ended after it."""
        job = replace(self._new_job(), fate="left alone", results=None)
        *_, last = job.questions.values()
        with outside.unanswered(last):
            await self._submit(job)
            self.jobs.append(job)
            yield
        await self._end(job)

    async def end_paused(self, job: Job) -> None:
        """Have it go on, if it has not ended, and wait for its end."""
        await self._client.call("POST", f"/v1/batches/{job.batch_id}/resume")
        await self._end(job)

    async def _customer(self) -> None:
        while not self._stopping:
            job = self._new_job()
            await self._submit(job)
            self.jobs.append(job)
            if job.fate == "cancelled":
                await self._client.call("POST", f"/v1/batches/{job.batch_id}/cancel")
            if job.fate == "paused":
                await self._client.call("POST", f"/v1/batches/{job.batch_id}/pause")
                await self._client.call("POST", f"/v1/batches/{job.batch_id}/resume")
            await self._end(job)
            if job.fate == "retried" and job.record["error_file_id"] is not None:
                await self._retry(job)
            else:
                # Its input is not needed any more; a cancelled batch's is left, for the rest of its time.
                await self._client.call("DELETE", f"/v1/files/{job.record['input_file_id']}")
            if self._random.random() < self._cleared:
                await self._clear(job)

    async def _end(self, job: Job) -> None:
        while job.record.get("status") not in _ENDED:
            job.record = await self._client.json("GET", f"/v1/batches/{job.batch_id}")
            if job.results is not None:
                await self._read_on(job, job.results)
            await asyncio.sleep(_PAUSE)
        self.ended += 1

    async def _read_on(self, job: Job, results: list[dict[str, Any]]) -> None:
        """Add the results that have come since the last time."""
        path, more = f"/v1/batches/{job.batch_id}/results", True
        while more:
            page = await self._client.json("GET", path, params={"after": job.results_read, "limit": 100})
            results += page["data"]
            job.results_read, more = page["next_after"], page["has_more"]

    async def _clear(self, job: Job) -> None:
        await self._check_job(job)
        for file_id in _outputs(job):
            await self._client.call("DELETE", f"/v1/files/{file_id}")
        job.cleared = True

    async def _retry(self, job: Job) -> None:
        """The lines that failed, again; they fail again."""
        questions = {name: text for name, text in job.questions.items() if text.startswith(FAILING)}
        headers = {"Idempotency-Key": self._new_key()}
        record = await self._client.json("POST", f"/v1/batches/{job.batch_id}/retry", headers=headers)
        again = Job(questions, "left alone", job.endpoint, record["id"], record)
        self.jobs.append(again)
        await self._end(again)

    def _new_key(self) -> str:
        return uuid.UUID(int=self._random.getrandbits(128)).hex

    def _new_job(self) -> Job:
        mark = self._random.getrandbits(64)
        questions = {
            f"line {number}": f"{FAILING if self._random.random() < 0.1 else ''}{mark:016x} {number}"
            for number in range(self._random.randint(1, self._most_lines))
        }
        (fate,) = self._random.choices(get_args(Fate), weights=(5, 1, 1, 1, 2))
        job = Job(questions, fate, self._random.choice(ENDPOINTS))
        if fate == "left alone" and self._random.random() < _READ:
            job.results = []
        return job

    async def _submit(self, job: Job) -> None:
        # The first endpoint that is not the batch's.
        other = next(each for each in ENDPOINTS if each != job.endpoint)
        lines = "".join(
            json.dumps(
                {
                    "custom_id": name,
                    "method": "POST",
                    "url": other if job.fate == "invalid" else job.endpoint,
                    "body": self._model.body(job.endpoint, question),
                }
            )
            + "\n"
            for name, question in job.questions.items()
        )
        upload = {"file": ("questions.jsonl", lines.encode())}
        file = await self._client.json("POST", "/v1/files", files=upload, data={"purpose": "batch"})
        stored = await self._client.call("GET", f"/v1/files/{file['id']}/content")
        assert stored.text == lines, "an upload that was acknowledged is not what was sent"
        wanted = {"input_file_id": file["id"], "endpoint": job.endpoint, "completion_window": "24h"}
        headers = {"Idempotency-Key": self._new_key()}
        job.record = await self._client.json("POST", "/v1/batches", json=wanted, headers=headers)
        job.batch_id = job.record["id"]

    async def check(self) -> None:
        """Every line exactly once, right, and counted. Raises `AssertionError`."""
        assert len({job.batch_id for job in self.jobs}) == len(self.jobs), "two requests got one batch"
        listed = [batch["id"] for batch in await self._all("/v1/batches")]
        assert sorted(listed) == sorted(job.batch_id for job in self.jobs), (
            "batches that nobody asked for, or lost ones"
        )
        for job in self.jobs:
            await self._check_job(job)
        if self._limited:
            await self._check_quotas()

    async def _check_quotas(self) -> None:
        """What counts against them is what there is: nothing is enqueued any more, and the files have their sizes."""
        state = await self._client.json("GET", "/dashboard/state")
        used = {quota["name"]: quota["used"] for quota in state["quotas"]}
        stored = sum(file["bytes"] for file in await self._all("/v1/files"))
        assert used == {"storage_bytes": stored, "enqueued_lines": 0, "enqueued_tokens": 0}

    @property
    def refused(self) -> int:
        """Tries that were answered with 429."""
        return self._client.refused

    @property
    def asked(self) -> set[str]:
        """Questions in the inputs."""
        return {question for job in self.jobs for question in job.questions.values()}

    async def _all(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        more = True
        while more:
            after = {"after": found[-1]["id"]} if found else {}
            page = await self._client.json("GET", path, params={"limit": 100, **after})
            found += page["data"]
            more = page["has_more"]
        return found

    async def _check_job(self, job: Job) -> None:
        record = job.record
        if job.cleared:
            for file_id in _outputs(job):
                content = await self._client.call("GET", f"/v1/files/{file_id}/content")
                assert content.status_code == 404, f"{file_id} was deleted and is there again"
            return
        if job.fate == "invalid":
            assert record["status"] == "failed"
            assert {problem["line"] for problem in record["errors"]["data"]} <= set(range(1, len(job.questions) + 1))
            return
        if record["status"] == "cancelled" and record["in_progress_at"] is None:
            assert record["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
            assert record["output_file_id"] is None
            assert record["error_file_id"] is None
            return
        outputs = await self._lines(record["output_file_id"])
        errors = await self._lines(record["error_file_id"])
        times = Counter(line["custom_id"] for line in outputs + errors)
        assert times == Counter(job.questions.keys()), f"{job.batch_id}: lines lost or doubled"
        self._check_lines(job, outputs, errors)
        counts = {"total": len(job.questions), "completed": len(outputs), "failed": len(errors)}
        assert record["request_counts"] == counts, f"{job.batch_id}: {record['request_counts']} is not {counts}"
        spent = [line["response"]["body"]["usage"] for line in outputs]
        assert record["usage"]["input_tokens"] == sum(usage["prompt_tokens"] for usage in spent)
        assert record["usage"]["output_tokens"] == sum(usage.get("completion_tokens", 0) for usage in spent)
        if job.results is not None:
            read = Counter(line["id"] for line in job.results)
            assert read == Counter(line["id"] for line in outputs + errors), f"{job.batch_id}: results not seen once"

    def _check_lines(self, job: Job, outputs: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
        for line in outputs:
            question = job.questions[line["custom_id"]]
            assert line["response"]["status_code"] == 200
            assert not question.startswith(FAILING), line
            self._model.check(job.endpoint, question, line["response"]["body"])
        for line in errors:
            if line["error"] is not None:
                assert (job.record["status"], line["error"]["code"]) == ("cancelled", "batch_cancelled"), line
            else:
                assert line["response"]["status_code"] == 400, line
                assert job.questions[line["custom_id"]].startswith(FAILING)

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = await self._client.call("GET", f"/v1/files/{file_id}/content")
        assert content.status_code == 200, content.text
        return [json.loads(line) for line in content.text.splitlines()]

    async def check_messages(self, outside: Outside) -> None:
        """Wait until each end was told; one id for each, however often it was sent."""
        for job in self.jobs:
            told = outside.events[job.batch_id]
            await eventually(partial(bool, told))
            assert len({ident for ident, _ in told}) == 1, f"{job.batch_id} was told under several ids"
            assert all(body == told[0][1] for _, body in told), "a message changed from one try to the next"
            assert told[0][1]["type"] == f"batch.{job.record['status']}"


def _outputs(job: Job) -> list[str]:
    return [job.record[name] for name in ("output_file_id", "error_file_id") if job.record[name] is not None]
