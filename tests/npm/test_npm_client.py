"""The official client for JavaScript runs one full batch."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.crash.campaign import start_service
from tests.crash.outside import Outside, answer_to

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`batch.mjs` beside the client that it needs."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node or no npm on this machine")
    folder = tmp_path_factory.mktemp("npm")
    for name in ("package.json", "batch.mjs"):
        shutil.copy(HERE / name, folder)
    install = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm could not install the client: {done.stderr.strip()[-200:]}")
    return folder / "batch.mjs"


def test_a_full_batch(script: Path, tmp_path: Path) -> None:
    questions = {f"line {number}": f"what is {number}?" for number in range(20)}
    input_file = tmp_path / "questions.jsonl"
    input_file.write_text("".join(json.dumps(_line(name, text)) + "\n" for name, text in questions.items()))
    told = asyncio.run(_run(script, input_file, tmp_path))
    assert told["batch"]["status"] == "completed"
    assert told["batch"]["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert told["batch"]["metadata"] == {"from": "node"}
    assert told["listed"] == [told["batch"]["id"]]
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, told["output"].splitlines())
    }
    assert answers == {name: answer_to(text) for name, text in questions.items()}
    assert (told["refusal"]["kind"], told["refusal"]["status"]) == ("NotFoundError", 404)


def _line(name: str, text: str) -> dict[str, Any]:
    body = {"model": "oracle", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


async def _run(script: Path, input_file: Path, folder: Path) -> dict[str, Any]:
    async with Outside() as outside:
        service = start_service(folder, str(folder / "batchwright.db"), outside)
        service.start()
        try:
            assert await service.ready(), service.tail()
            node = await asyncio.create_subprocess_exec(
                "node", script, f"{service.url}/v1", input_file, stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await node.communicate()
            assert node.returncode == 0
            told: dict[str, Any] = json.loads(printed)
            return told
        finally:
            await service.stop()
