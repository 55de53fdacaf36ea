"""Lines that are ranked, scored and classified: through `run`, a worker and HTTP alike; killed and resumed."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from tests import forked
from tests.inference.classifiers import own_logits, save_classifier
from tests.long_form import examples
from typer.testing import CliRunner

from batchwright import Classifier, Encoder
from batchwright.cli.main import app
from batchwright.jobs.run import run
from batchwright.models import resolve
from batchwright.server.app import create_app
from batchwright.service.composition import open_services
from batchwright.service.settings import Settings

pytestmark = pytest.mark.needs_model

RERANK, SCORE, CLASSIFY, EMBED = "/v1/rerank", "/v1/score", "/classify", "/v1/embeddings"
QUERY = "Which river is the longest?"
DOCUMENTS = ["The Rhine.", "Bread.", "A long river, and a wide one.", "Bread."]
LONG = "rain " * 70
LABELS = ["bad", "fair", "good"]
LINES = examples(120, long=400)

GOOD: list[tuple[str, dict[str, Any]]] = [
    (RERANK, {"query": QUERY, "documents": DOCUMENTS}),
    (RERANK, {"query": QUERY, "documents": [{"text": each} for each in DOCUMENTS], "return_documents": True}),
    (RERANK, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "model": "reranker", "user": "u"}),
    (RERANK, {"query": QUERY, "documents": [LONG], "top_n": 9, "truncate_prompt_tokens": -1}),
    (SCORE, {"text_1": QUERY, "text_2": "The Rhine."}),
    (SCORE, {"text_1": QUERY, "text_2": DOCUMENTS, "priority": 1, "deadline_ms": 600_000}),
    (SCORE, {"text_1": DOCUMENTS, "text_2": DOCUMENTS, "truncate_prompt_tokens": 8}),
    (CLASSIFY, {"input": "A fine day."}),
    (CLASSIFY, {"input": ["A fine day.", "Rain."], "model": "feelings"}),
    (CLASSIFY, {"input": [101, 2054, 102], "model": "feelings"}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    (RERANK, {"documents": DOCUMENTS}),
    (RERANK, {"query": QUERY, "documents": []}),
    (RERANK, {"query": QUERY, "documents": ["a", 5]}),
    (RERANK, {"query": QUERY, "documents": ["a", ""]}),
    (RERANK, {"query": QUERY, "documents": DOCUMENTS, "top_n": -1}),
    (RERANK, {"query": QUERY, "documents": DOCUMENTS, "model": "feelings"}),
    (RERANK, {"query": QUERY, "documents": ["a", LONG]}),
    (RERANK, {"query": QUERY, "documents": DOCUMENTS, "max_chunks_per_doc": 5}),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
    (SCORE, {"text_1": "a"}),
    (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 65}),
    (CLASSIFY, {"input": ""}),
    (CLASSIFY, {"input": "a", "model": "minilm"}),
    (CLASSIFY, {"input": [10**6]}),
    (CLASSIFY, {"input": "a", "temperature": 1}),
]
BODIES = {f"good-{n}": each for n, each in enumerate(GOOD)} | {f"bad-{n}": each for n, each in enumerate(BAD)}


def line(custom_id: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}).encode() + b"\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models; lines name them, and files of settings, by their paths in it."""
    folder = tmp_path_factory.mktemp("models")
    save_classifier(folder / "reranker", resolve("minilm"), "bert", ["score"])
    save_classifier(folder / "feelings", resolve("minilm"), "bert", LABELS)
    return folder


@pytest.fixture
def here(models: Path, shallow_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(shallow_cache))
    monkeypatch.chdir(models)
    return models


def kept(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A body without what may differ."""
    return {name: value for name, value in fields.items() if name not in ("id", "created")}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The answers that differ by more than the last digits of numbers, as rows may be computed beside others."""
    return {
        name: (one.get(name), other.get(name))
        for name in sorted(one.keys() | other.keys())
        if not _alike(one.get(name), other.get(name))
    }


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-5)
    return bool(one == other)


def error(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    return fields["code"], fields["message"], fields.get("param")


def test_the_same_through_run_a_worker_and_http(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(line(name, *each) for name, each in BODIES.items()))
    run(source, tmp_path / "out.jsonl", classifiers=["reranker", "feelings"], embedding_model="minilm")
    ran: dict[str, Any] = {
        result["custom_id"]: kept(result["response"]["body"]) if result["response"] else error(result["error"])
        for result in map(json.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    }
    assert {name: isinstance(answer, dict) for name, answer in ran.items()} == {
        name: name.startswith("good") for name in BODIES
    }

    async def over_http() -> dict[str, Any]:
        settings = Settings.model_validate(
            {"data": tmp_path / "http", "model": "smollm2-135m", "kv_memory": "64MB", "classifier": "reranker,feelings"}
        )
        answers = {}
        async with open_services(settings) as services:
            transport = httpx2.ASGITransport(create_app(services))
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
                listed = (await http.get("/v1/models")).json()["data"]
                assert {"reranker", "feelings"} < {each["id"] for each in listed}
                for name, (endpoint, body) in BODIES.items():
                    reply = (await http.post(endpoint, json=body)).json()
                    answers[name] = error(reply["error"]) if "error" in reply else kept(reply)
        return answers

    online = asyncio.run(over_http())
    # Which models there are differs: the service has one that generates.
    assert differing(online, ran).keys() <= {"bad-12"}, differing(online, ran)
    assert online["bad-12"][0] == ran["bad-12"][0]

    monkeypatch.setenv("BATCHWRIGHT_DATA", str(tmp_path / "data"))
    batches = {}
    for endpoint, model in {(endpoint, body.get("model")) for endpoint, body in BODIES.values()}:
        part = tmp_path / "part.jsonl"
        part.write_bytes(
            b"".join(
                line(name, *each)
                for name, each in BODIES.items()
                if (each[0], each[1].get("model")) == (endpoint, model)
            )
        )
        batches[endpoint, model] = jobs("submit", part)
    jobs("work", "--until-idle", "--model=smollm2-135m", "--kv-memory=64MB", "--classifier=reranker,feelings")
    worked = {}
    for batch in batches.values():
        for result in map(json.loads, jobs("results", batch).splitlines()):
            body = result["response"]["body"]
            worked[result["custom_id"]] = error(body["error"]) if "error" in body else kept(body)
    assert differing(worked, online) == {}


def jobs(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["jobs", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_answers_are_made_of_transformers_own_logits(models: Path, tmp_path: Path) -> None:
    """In the forms of vLLM and Text Embeddings Inference."""
    source = tmp_path / "in.jsonl"
    asked: list[tuple[str, dict[str, Any]]] = [
        (RERANK, {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}),
        (SCORE, {"text_1": QUERY, "text_2": DOCUMENTS}),
        (CLASSIFY, {"input": DOCUMENTS}),  # the reranker, which has one label, could answer it, too
    ]
    source.write_bytes(b"".join(line(str(number), *each) for number, each in enumerate(asked)))
    run(source, tmp_path / "out.jsonl", classifiers=[str(models / "reranker"), str(models / "feelings")])
    lines = map(json.loads, (tmp_path / "out.jsonl").read_bytes().splitlines())
    ranked, scored, classes = (
        each["response"]["body"] for each in sorted(lines, key=lambda each: int(each["custom_id"]))
    )

    logits = own_logits(models / "reranker", [(QUERY, each) for each in DOCUMENTS])[:, 0]
    expected = 1 / (1 + np.exp(-logits))
    best = np.argsort(-expected, kind="stable")[:2]
    assert [each["index"] for each in ranked["results"]] == best.tolist()
    np.testing.assert_allclose([each["relevance_score"] for each in ranked["results"]], expected[best], atol=1e-5)
    assert [(each["index"], each["object"]) for each in scored["data"]] == [(n, "score") for n in range(4)]
    np.testing.assert_allclose([each["score"] for each in scored["data"]], expected, atol=1e-5)
    powers = np.exp(own_logits(models / "feelings", DOCUMENTS))
    shares = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose([each["probs"] for each in classes["data"]], shares, atol=1e-5)
    assert [each["label"] for each in classes["data"]] == [LABELS[at] for at in shares.argmax(1)]
    assert all(each["num_classes"] == 3 for each in classes["data"])
    tokenizer = Classifier(models / "feelings").tokenizer
    assert classes["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(each)) for each in DOCUMENTS)
    assert scored["usage"]["total_tokens"] == ranked["usage"]["total_tokens"]


def test_lines_of_all_kinds_killed_and_resumed(models: Path, shallow_path: Path, tmp_path: Path) -> None:
    """SIGKILL at moments that the output chooses; each line is there once, and has the answer of a run of its own."""
    rng = random.Random(7)
    words = ["river", "bread", "rain", "stone", "wide", "long", "the", "a", "of"]
    kinds = [RERANK, SCORE, CLASSIFY, EMBED]
    generated: dict[str, Callable[[str], dict[str, Any]]] = {
        "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
        "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
        "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
    }
    asked: dict[str, tuple[str, dict[str, Any]]] = {}
    for number in range(LINES):
        texts = [" ".join(rng.choices(words, k=rng.randrange(1, 12))) for _ in range(3)]
        bodies: dict[str, dict[str, Any]] = {
            RERANK: {"query": texts[0], "documents": texts[1:]},
            SCORE: {"text_1": texts[0], "text_2": texts[1:]},
            CLASSIFY: {"model": str(models / "feelings"), "input": texts[0]},
            EMBED: {"input": texts[0], "encoding_format": "base64"},
        }
        kind = rng.choice(kinds) if number % 40 else sorted(generated)[number // 40 % len(generated)]
        asked[f"q{number}"] = kind, bodies.get(kind) or generated[kind](texts[0])
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(name, *each) for name, each in asked.items()))
    command: list[str | Path] = [
        *("run", source, "-o", output, "--quiet", "--model", shallow_path, "--embedding-model", "minilm"),
        *("--kv-memory", "64MB", "--classifier", models / "reranker", "--classifier", models / "feelings"),
    ]
    kills = 0
    for size in (1, LINES * 500):
        started = forked.start(command, tmp_path / "errors")
        while started.process.is_alive() and not (output.exists() and output.stat().st_size >= size):
            time.sleep(0.005)
        started.process.kill()
        kills += started.wait() == -signal.SIGKILL
    assert kills, "no run was killed"
    last = forked.start(command, tmp_path / "errors")
    assert last.wait() == 0, last.errors()
    results = [json.loads(each) for each in output.read_bytes().splitlines()]
    assert Counter(each["custom_id"] for each in results) == Counter(list(asked))
    answers = {each["custom_id"]: each["response"]["body"] for each in results}

    def of(kind: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(body, answers[name]) for name, (endpoint, body) in asked.items() if endpoint == kind]

    reranker, feelings, encoder = Classifier(models / "reranker"), Classifier(models / "feelings"), Encoder()
    assert all(of(kind) for kind in (*kinds, *generated))
    for body, answer in of(SCORE):
        expected = reranker.score([(body["text_1"], each) for each in body["text_2"]])
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-5)
    for body, answer in of(RERANK):
        ranked = reranker.rank(body["query"], body["documents"])
        np.testing.assert_allclose(
            [each["relevance_score"] for each in answer["results"]], [each.score for each in ranked], atol=1e-5
        )
    labelled = of(CLASSIFY)
    np.testing.assert_allclose(
        [answer["data"][0]["probs"] for _, answer in labelled],
        feelings.classify([body["input"] for body, _ in labelled]),
        atol=1e-5,
    )
    embedded = of(EMBED)
    vectors = [np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4") for _, answer in embedded]
    np.testing.assert_allclose(vectors, encoder.encode([body["input"] for body, _ in embedded]), atol=1e-5)
