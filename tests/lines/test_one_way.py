"""The same lines through `run`, through `jobs submit` and a worker, and over HTTP: the same bodies, the same errors."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from typer.testing import CliRunner

from batchwright.cli.main import app
from batchwright.jobs.run import run
from batchwright.server.app import create_app
from batchwright.service.composition import open_services
from batchwright.service.settings import Settings

pytestmark = pytest.mark.needs_model

CHAT, TEXT, VECTOR = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GENERATES, EMBEDS = "smollm2-135m", "minilm"
MODELS: dict[str, Any] = {"model": GENERATES, "embedding_model": EMBEDS, "dtype": "float32", "kv_memory": "64MB"}
MESSAGES = [{"role": "user", "content": "Name a river."}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 4, "temperature": 0},
    TEXT: {"prompt": "The sky is", "max_tokens": 4, "temperature": 0},
    VECTOR: {"input": "A short text."},
}

GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"model": GENERATES}),
    (CHAT, {"n": 2, "temperature": 0.9, "seed": 3}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 3}),
    (CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Name a lake."}]}]}),
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "tools": [], "response_format": {"type": "text"}, "stream": False}),
    (CHAT, {"response_format": {"type": "json_object"}, "temperature": 1, "seed": 4}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}}),
    (CHAT, {"structured_outputs": {"choice": ["yes", "no"]}}),
    (TEXT, {"guided_regex": "[0-9]{3}"}),
    (TEXT, {}),
    (TEXT, {"model": GENERATES, "stop": [" blue", "."]}),
    (TEXT, {"prompt": ["One", "Two"], "n": 2, "temperature": 1, "seed": 7}),
    (TEXT, {"prompt": [504, 3575, 253]}),
    (TEXT, {"logprobs": 2}),
    (TEXT, {"logit_bias": {"11": -100}, "presence_penalty": 0.5, "min_tokens": 2}),
    (TEXT, {"max_tokens": 3, "ignore_eos": True}),
    (TEXT, {"priority": 1, "deadline_ms": 600_000}),
    (TEXT, {"echo": True}),
    (TEXT, {"echo": True, "logprobs": 2, "max_tokens": 0}),
    (TEXT, {"prompt": [504, 3575, 253], "echo": True, "logprobs": 0, "n": 2}),
    (TEXT, {"prompt_logprobs": 1, "max_tokens": 0}),
    (CHAT, {"prompt_logprobs": 0, "max_tokens": 1}),
    (VECTOR, {}),
    (VECTOR, {"model": EMBEDS, "input": ["One", "Two"]}),
    (VECTOR, {"input": [101, 7592, 102]}),
    (VECTOR, {"encoding_format": "base64", "dimensions": 384}),
]

BAD_BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": None}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"temperature": 2.5}),
    (CHAT, {"top_logprobs": 1}),
    (CHAT, {"tools": [{"type": "function"}]}),
    (CHAT, {"response_format": {"type": "json"}}),
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"if": {"minProperties": 1}, "then": {"required": ["a"]}}},
            }
        },
    ),
    (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
    (CHAT, {"made_up": 1}),
    (CHAT, {"max_token": 5}),
    (CHAT, {"n": 0}),
    (CHAT, {"seed": "x"}),
    (CHAT, {"deadline_ms": 1, "deadline": 1}),
    (TEXT, {"prompt": None}),
    (TEXT, {"prompt": ["a", 1]}),
    (TEXT, {"prompt": "word " * 20_000}),
    (TEXT, {"prompt": [10**6]}),
    (CHAT, {"echo": True}),
    (TEXT, {"prompt_logprobs": 21}),
    (TEXT, {"stop": 5}),
    (TEXT, {"logit_bias": {"x": 1}}),
    (TEXT, {"max_tokens": 0}),
    (TEXT, {"n": 129}),
    (TEXT, {"priority": "high"}),
    (TEXT, {"model": "gpt-4o"}),
    (VECTOR, {"input": None}),
    (VECTOR, {"input": ""}),
    (VECTOR, {"dimensions": 7}),
    (VECTOR, {"model": GENERATES}),
]

_FRAME: dict[str, Any] = {"custom_id": "frame", "method": "POST", "url": CHAT, "body": BASE[CHAT]}
_BAD_FRAMES: list[dict[str, Any]] = [
    {"custom_id": None},
    {"custom_id": 5},
    {"custom_id": "x" * 513},
    {"method": "GET"},
    {"url": "/v1/messages"},
    {"body": None},
    {"body": [1]},
    {"body": {**BASE[CHAT], "stream": True}},
    {"body": {**BASE[CHAT], "model": 5}},
]
BAD_LINES: list[bytes] = [
    b"{",
    b"[1]",
    b'{"custom_id": "\xff"}',
    *(json.dumps({**_FRAME, "custom_id": f"f{i}", **changed}).encode() for i, changed in enumerate(_BAD_FRAMES)),
    json.dumps(_FRAME).encode(),
    json.dumps(_FRAME).encode(),
]
"""Of the last two only the second is bad: it has the id of the first."""

Answer = tuple[str, Any]
"""What came of a line: `("body", …)`, or `("error", (code, message, param))`."""


def body_of(endpoint: str, changed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**BASE[endpoint], **changed}.items() if value is not None}


BODIES = {
    f"{kind}-{place}": (endpoint, body_of(endpoint, changed))
    for kind, cases in (("good", GOOD), ("bad", BAD_BODIES))
    for place, (endpoint, changed) in enumerate(cases)
}


def line(custom_id: str) -> bytes:
    endpoint, body = BODIES[custom_id]
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}).encode()


def error(fields: dict[str, Any]) -> Answer:
    return "error", (fields["code"], fields["message"], fields.get("param"))


def body(fields: dict[str, Any]) -> Answer:
    """A body without what may differ: its id, time, what the cache held, whether it was shared; vectors to 3 digits."""
    kept = {name: value for name, value in fields.items() if name not in ("id", "created")}
    without = ("prompt_tokens_details", "deduplicated")
    kept["usage"] = {name: count for name, count in kept["usage"].items() if name not in without}
    for entry in kept.get("data", ()):
        entry["embedding"] = _rounded(entry["embedding"])
    for choice in kept.get("choices", ()):
        choice["logprobs"] = _without_digits(choice["logprobs"])
    for part in (kept, *kept.get("choices", ())):
        if "prompt_logprobs" in part:
            part["prompt_logprobs"] = _without_digits(part["prompt_logprobs"])
    return "body", kept


def _rounded(vector: str | list[float]) -> tuple[type, list[float]]:
    numbers = np.frombuffer(base64.b64decode(vector), "<f4") if isinstance(vector, str) else np.array(vector)
    return type(vector), (np.round(numbers, 3) + 0.0).tolist()


def _without_digits(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _without_digits(each) for name, each in value.items()}
    return [_without_digits(each) for each in value] if isinstance(value, list) else value


def write(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(each + b"\n" for each in lines))
    return path


@pytest.fixture(scope="module", autouse=True)
def _shallow(shallow_cache: Path) -> Iterator[None]:
    """Have fewer layers in the model of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_CACHE", str(shallow_cache))
        yield


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Answer], dict[int, Answer]]:
    """The answers of `run`, all lines in one file: by id, and of the bad frames by number."""
    folder = tmp_path_factory.mktemp("run")
    source = write(folder / "in.jsonl", [*BAD_LINES, *map(line, BODIES)])
    run(source, folder / "out.jsonl", dedupe=False, **MODELS)
    answers: dict[str, Answer] = {}
    frames: dict[int, Answer] = {}
    for result in map(json.loads, (folder / "out.jsonl").read_bytes().splitlines()):
        number = int(result["id"].rpartition("_")[2])
        answer = error(result["error"]) if result["response"] is None else body(result["response"]["body"])
        if number <= len(BAD_LINES):
            frames[number] = answer
        else:
            answers[result["custom_id"]] = answer
    return answers, frames


def groups() -> dict[tuple[str, str | None], list[str]]:
    """Ids by what the lines of one batch have in common: endpoint and model."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for custom_id, (endpoint, fields) in BODIES.items():
        found.setdefault((endpoint, fields.get("model")), []).append(custom_id)
    return found


def jobs(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["jobs", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_run_and_a_worker(
    ran: tuple[dict[str, Answer], dict[int, Answer]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_DATA", str(tmp_path / "data"))
    batches = [
        jobs("submit", write(tmp_path / f"{number}.jsonl", map(line, ids)))
        for number, ids in enumerate(groups().values())
    ]
    refused = jobs("submit", write(tmp_path / "bad.jsonl", BAD_LINES), "--endpoint", CHAT)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in MODELS.items()]
    jobs("work", "--until-idle", *flags)
    answers = {}
    for batch in batches:
        for result in map(json.loads, jobs("results", batch).splitlines()):
            fields = result["response"]["body"]
            answers[result["custom_id"]] = error(fields["error"]) if "error" in fields else body(fields)
    assert len(answers) == len(BODIES)
    for custom_id, answer in answers.items():
        assert answer == ran[0][custom_id], custom_id
    problems = {entry["line"]: error(entry) for entry in json.loads(jobs("show", refused, "--json"))["errors"]["data"]}
    assert problems == {number: answer for number, answer in ran[1].items() if answer[0] == "error"}
    assert len(problems) == len(BAD_LINES) - 1


def test_run_and_http(ran: tuple[dict[str, Answer], dict[int, Answer]], tmp_path: Path) -> None:
    async def ask() -> dict[str, Answer]:
        answers = {}
        settings = Settings.model_validate({"data": tmp_path, **MODELS})
        async with open_services(settings) as services:
            transport = httpx2.ASGITransport(create_app(services))
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
                for custom_id, (endpoint, fields) in BODIES.items():
                    reply = (await http.post(endpoint, json=fields)).json()
                    answers[custom_id] = error(reply["error"]) if "error" in reply else body(reply)
        return answers

    for custom_id, answer in asyncio.run(ask()).items():
        assert answer == ran[0][custom_id], custom_id


def test_which_lines_are_good(ran: tuple[dict[str, Answer], dict[int, Answer]]) -> None:
    assert len(BODIES) + len(BAD_LINES) >= 60
    for custom_id, (kind, what) in ran[0].items():
        assert (kind == "body") == custom_id.startswith("good"), (custom_id, what)
