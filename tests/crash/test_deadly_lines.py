"""Lines that end the process that computes them: by a signal, by a defect in native code, by leaving it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.crash.deadly import DEATHS

from batchwright.service.batches.batch_service import BatchService
from batchwright.service.files.blobs import Blobs
from batchwright.service.limits import ServiceLimits
from batchwright.store import open_store
from batchwright.store.records import BatchRecord

ENDPOINT = "/v1/completions"


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _submit(data: Path, prompts: dict[str, list[str]]) -> list[BatchRecord]:
    """A batch for each tenant."""
    made = []
    async with open_store(data / "batchwright.db") as store:
        jobs = BatchService(store, Blobs(data / "files"), limits=ServiceLimits(), on_work=lambda: None)
        for tenant, each in prompts.items():
            lines = [
                {"custom_id": prompt, "method": "POST", "url": ENDPOINT, "body": {"model": "deadly", "prompt": prompt}}
                for prompt in each
            ]
            content = "".join(json.dumps(line) + "\n" for line in lines).encode()
            file = await jobs.upload(tenant, "input.jsonl", _once(content))
            made.append(await jobs.create_batch(tenant, input_file_id=file.id, endpoint=ENDPOINT))
    return made


async def _outcome(data: Path, batch: BatchRecord) -> tuple[BatchRecord, list[dict[str, Any]], list[dict[str, Any]]]:
    """The batch, and the lines of its files."""
    async with open_store(data / "batchwright.db") as store:
        jobs = BatchService(store, Blobs(data / "files"), limits=ServiceLimits(), on_work=lambda: None)
        ended = await jobs.batch(batch.tenant, batch.id)
        files = []
        for file_id in (ended.output_file_id, ended.error_file_id):
            content = b""
            if file_id is not None:
                _, chunks = await jobs.content(batch.tenant, file_id)
                content = b"".join([chunk async for chunk in chunks])
            files.append([json.loads(line) for line in content.splitlines()])
    return ended, files[0], files[1]


def test_they_fail_after_three_deaths_and_all_others_succeed(tmp_path: Path) -> None:
    data, calls = tmp_path / "data", tmp_path / "calls"
    data.mkdir()
    deadly = [f"{how} 1" for how in DEATHS]
    prompts = {
        "a": [*(f"a {number}" for number in range(40)), *deadly],
        "b": [f"b {number}" for number in range(40)],
    }
    batches = asyncio.run(_submit(data, prompts))
    lives = str(3 * len(deadly) + 1)
    command = [sys.executable, "-m", "tests.crash.deadly", str(data), str(calls), lives]
    ended = subprocess.run(command, capture_output=True, text=True)
    statuses = [*map(int, ended.stdout.split())]
    assert {*statuses} == {-9, -11, 3, 0}, ended.stderr[-2000:]
    assert statuses[-1] == 0, ended.stderr[-2000:]
    begun = Counter(calls.read_text().splitlines())
    for batch, each in zip(batches, prompts.values(), strict=True):
        record, output, errors = asyncio.run(_outcome(data, batch))
        good = [prompt for prompt in each if prompt not in deadly]
        assert record.status == "completed"
        assert (record.counts.total, record.counts.completed) == (len(each), len(good))
        assert record.usage.output_tokens == len(good)
        assert [line["custom_id"] for line in output] == good
        assert all(line["response"]["body"]["choices"][0]["text"] == line["custom_id"].upper() for line in output)
        assert [line["custom_id"] for line in errors] == [prompt for prompt in each if prompt in deadly]
        assert all(line["error"]["code"] == "crashed" for line in errors)
    assert all(begun[prompt] <= 3 for prompt in deadly)
    # Beyond the first death, the other tenant's lines are in no company with those that kill.
    assert max(begun[prompt] for prompt in prompts["b"]) <= 2
