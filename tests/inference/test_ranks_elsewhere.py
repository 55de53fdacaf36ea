"""Lines that an endpoint elsewhere ranks, scores and classifies: this service is the endpoint, over the loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import uvicorn
from tests.inference.classifiers import save_classifier

from batchwright import Classifier, Encoder
from batchwright.errors import AnswerBroken, InputError
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.inference import Call
from batchwright.inference.loading import local_inference
from batchwright.jobs.run import run
from batchwright.models import resolve
from batchwright.server.app import create_app
from batchwright.service.composition import open_services
from batchwright.service.loading import load_inference
from batchwright.service.settings import Settings
from batchwright.wire.dialects import OPENAI, dialect_for
from batchwright.wire.requests import CLASSIFY_URL, EMBEDDINGS_URL, RERANK_URL, SCORE_URL

QUERY, DOCUMENTS = "Which river is long?", ["Bread.", "The Rhine.", "A long river."]
CROSS, EMBEDS, LABELS = "reranker", "minilm", "feelings"
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/rerank", {"model": CROSS, "query": QUERY, "documents": DOCUMENTS, "top_n": 2}),
    ("/rerank", {"model": CROSS, "query": QUERY, "documents": DOCUMENTS, "return_documents": True}),
    ("/v2/rerank", {"model": EMBEDS, "query": QUERY, "documents": DOCUMENTS}),
    ("/v1/score", {"model": CROSS, "text_1": QUERY, "text_2": DOCUMENTS}),
    ("/score", {"model": CROSS, "queries": DOCUMENTS, "documents": DOCUMENTS}),
    ("/score", {"model": EMBEDS, "data_1": QUERY, "data_2": DOCUMENTS}),
    ("/score", {"model": EMBEDS, "queries": DOCUMENTS, "items": DOCUMENTS}),
    ("/classify", {"model": LABELS, "input": DOCUMENTS}),
    ("/v1/classify", {"model": LABELS, "input": "A fine day.", "use_activation": True}),
    ("/v1/embeddings", {"model": EMBEDS, "input": QUERY}),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models, in which tests are run, so that they have short names."""
    folder = tmp_path_factory.mktemp("models")
    save_classifier(folder / CROSS, resolve(EMBEDS), "bert", ["score"])
    save_classifier(folder / LABELS, resolve(EMBEDS), "bert", ["bad", "good"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def address(here: Path) -> Iterator[str]:
    """Address of this service with models, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready, server = Event(), list[uvicorn.Server]()

    async def serve() -> None:
        models = Classifier(f"./{CROSS}"), Classifier(f"./{LABELS}/")
        inference = local_inference(None, Encoder(EMBEDS), classifiers=models)
        async with open_services(Settings(data=here / "data"), inference=inference) as services:
            config = uvicorn.Config(create_app(services), log_level="error", lifespan="off")
            server.append(uvicorn.Server(config))
            ready.set()
            await server[0].serve([listener])

    thread = Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(300)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server[0].should_exit = True
    thread.join(60)


def lines(asked: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body}) + "\n"
        for number, (url, body) in enumerate(asked)
    )


def told(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body without what differs each time, and with numbers of three digits, as rows are computed beside others."""
    found: dict[str, Any] = _rounded({name: value for name, value in body.items() if name not in ("id", "created")})
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def bodies_of(output: Path) -> dict[int, dict[str, Any]]:
    found = map(json.loads, output.read_text().splitlines())
    return {int(each["custom_id"]): told(each["response"]["body"]) for each in found}


async def posted(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    async with httpx2.AsyncClient(timeout=120) as http:
        reply = await http.post(url, json=body)
        assert reply.status_code == 200, reply.text
        return told(reply.json())


def test_lines_are_answered_whole_and_counted(address: str, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines([*ASKED, *ASKED[:2]]))
    report = run(source, output, backend=address, price="input=1,output=0", budget=5)
    assert (report.succeeded, report.failed) == (len(ASKED) + 2, 0), report.failures
    answers = bodies_of(output)
    root = address.removesuffix("/v1")
    for number, (url, body) in enumerate(ASKED):
        online = asyncio.run(posted(root + url, body))
        assert _without_cost(answers[number]) == online, url
    # The last two are the same as the first two, and asked once.
    assert [answers[len(ASKED) + at]["usage"]["deduplicated"] for at in range(2)] == [True, True]
    used = sum(answers[number]["usage"]["total_tokens"] for number in range(len(ASKED)))
    assert report.spending is not None
    assert report.spending.cost == pytest.approx(used / 1e6)
    with pytest.raises(InputError, match="classifiers="):
        run(source, output, backend=address, classifiers=[CROSS])


def _without_cost(body: Mapping[str, Any]) -> dict[str, Any]:
    usage = {name: value for name, value in body["usage"].items() if name != "cost"}
    return {**body, "usage": usage}


def test_a_dry_run_reads_what_the_endpoint_alone_knows(address: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(lines([(RERANK_URL, {"query": QUERY, "documents": DOCUMENTS, "max_chunks_per_doc": 3})]))
    seen = run(source, tmp_path / "out.jsonl", backend=address, model=CROSS, dry_run=True)
    assert (seen.total, seen.failures) == (1, [])


def test_served_from_elsewhere(address: str, tmp_path: Path) -> None:
    """`serve --backend`: online, and as a batch whose endpoint has another name."""

    async def work() -> None:
        settings = Settings(data=tmp_path / "data", backend=address)
        async with open_services(settings, inference=await load_inference(settings)) as services:
            transport = httpx2.ASGITransport(create_app(services))
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=120) as http:
                client = openai.AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:8000/v1", http_client=http)
                for url, body in ASKED:
                    reply = await http.post(url, json=body)
                    assert told(reply.json()) == await posted(address.removesuffix("/v1") + url, body), url
                ranks = [each for each in ASKED if "rerank" in each[0] and each[1]["model"] == CROSS]
                uploaded = await client.files.create(file=("in.jsonl", lines(ranks).encode()), purpose="batch")
                endpoint: Any = "/rerank"
                batch = await client.batches.create(
                    input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h"
                )
                assert batch.endpoint == RERANK_URL
                while batch.status not in ("completed", "failed"):
                    await asyncio.sleep(0.02)
                    batch = await client.batches.retrieve(batch.id)
                assert batch.output_file_id is not None, batch.errors
                answers = (await client.files.content(batch.output_file_id)).text
                (tmp_path / "out.jsonl").write_text(answers)

    asyncio.run(work())
    found = bodies_of(tmp_path / "out.jsonl")
    assert [len(found[at]["results"]) for at in range(2)] == [2, 3]


def test_vectors_are_compared(here: Path) -> None:
    encoder = Encoder(EMBEDS)
    inference = local_inference(None, encoder, classifiers=[Classifier(CROSS)])

    async def ask(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        return await inference.answer(Call(endpoint, body, "req_1"))

    async def work() -> list[dict[str, Any]]:
        answers = [
            await ask(SCORE_URL, {"model": EMBEDS, "text_1": QUERY, "text_2": DOCUMENTS}),
            await ask(RERANK_URL, {"model": EMBEDS, "query": QUERY, "documents": DOCUMENTS, "top_n": 1}),
            await ask(SCORE_URL, {"text_1": QUERY, "text_2": DOCUMENTS}),
        ]
        with pytest.raises(Exception, match=r'^text_1\[0\]: .* \("truncate_prompt_tokens": -1 in the body cuts it\)$'):
            await ask(SCORE_URL, {"model": EMBEDS, "text_1": "rain " * 600, "text_2": "a"})
        await inference.close()
        return answers

    scored, ranked, crossed = asyncio.run(work())
    vectors = encoder.encode([QUERY, *DOCUMENTS])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = vectors[1:] @ vectors[0]
    scores = [each["score"] for each in scored["data"]]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    [best] = ranked["results"]
    assert best["index"] == int(expected.argmax())
    assert best["relevance_score"] == pytest.approx(max(scores), abs=1e-5)
    tokens = sum(len(encoder.tokenizer.encode(each)) for each in [QUERY, *DOCUMENTS])
    assert scored["usage"] == ranked["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert crossed["model"] == CROSS  # which was trained for it


@pytest.mark.parametrize("model", [CROSS, EMBEDS])
def test_equal_documents_are_computed_once_and_keep_their_order(
    here: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, classifier = Encoder(EMBEDS), Classifier(CROSS)
    computing: Any = {CROSS: classifier, EMBEDS: encoder}[model]
    own, computed = computing.generate_batch, []

    def generate_batch(prompts: list[Any]) -> Any:
        computed.extend(prompts)
        return own(prompts)

    monkeypatch.setattr(computing, "generate_batch", generate_batch)
    inference = local_inference(None, encoder, classifiers=[classifier])
    documents = ["Bread." if at % 3 else f"A river, the {at}th." for at in range(70)]
    bread = [at for at in range(70) if at % 3]

    async def work() -> dict[str, Any]:
        answer = await inference.answer(
            Call(RERANK_URL, {"model": model, "query": QUERY, "documents": documents}, "req_1")
        )
        await inference.close()
        return answer

    answer = asyncio.run(work())
    assert len(computed) == len(set(documents)) + (model == EMBEDS)
    ranked = [each["index"] for each in answer["results"]]
    assert [at for at in ranked if at in bread] == bread
    assert sorted(ranked) == list(range(70))
    assert len({each["relevance_score"] for each in answer["results"] if each["index"] in bread}) == 1
    inputs: dict[str, list[Any]] = {
        CROSS: classifier.tokenizer.encode_inputs([(QUERY, each) for each in documents]),
        EMBEDS: encoder.tokenizer.encode_many([QUERY, *documents]),
    }
    assert answer["usage"]["total_tokens"] == sum(map(len, inputs[model]))


class Elsewhere(ThreadingHTTPServer):
    """An endpoint that refuses the first request, and then answers as it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.answer: dict[str, Any] = {}


class _Handler(BaseHTTPRequestHandler):
    server: Elsewhere

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        refused = len(self.server.paths) == 1
        content = json.dumps({"error": {"message": "slow down"}} if refused else self.server.answer).encode()
        self.send_response(429 if refused else 200)
        self.send_header("retry-after-ms", "1")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


def test_retries_paths_and_answers_without_what_was_asked_for() -> None:
    server = Elsewhere()
    Thread(target=server.serve_forever, daemon=True).start()

    async def work() -> None:
        endpoint = EndpointInference(f"http://127.0.0.1:{server.server_port}/v1", models={"m": "m"})
        server.answer = {"results": [{"index": 0, "relevance_score": 0.5}], "meta": {}}
        ranked = await endpoint.answer(Call(RERANK_URL, {"query": "a", "documents": ["b"], "n": 5}, "r"))
        assert ranked == server.answer
        server.answer = {"data": [{"index": 0, "label": "a"}]}
        await endpoint.answer(Call(CLASSIFY_URL, {"input": "a"}, "c"))
        with pytest.raises(AnswerBroken, match="without results"):
            await endpoint.answer(Call(RERANK_URL, {"query": "a", "documents": ["b"]}, "r"))
        await endpoint.answer(Call(SCORE_URL, {"text_1": "a", "text_2": "b"}, "s"))
        await endpoint.close()

    asyncio.run(work())
    server.shutdown()
    server.server_close()
    assert server.paths[:3] == ["/v1/rerank", "/v1/rerank", "/classify"]
    assert server.paths[-1] == "/v1/score"


def test_where_labels_are_asked_for() -> None:
    assert OPENAI.is_beside(OPENAI.path(CLASSIFY_URL))
    assert not any(OPENAI.is_beside(OPENAI.path(each)) for each in (RERANK_URL, SCORE_URL, EMBEDDINGS_URL))
    jina = dialect_for(None, "https://api.jina.ai/v1")
    assert not jina.is_beside(jina.path(CLASSIFY_URL))
