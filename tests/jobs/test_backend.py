"""`run` with an endpoint that computes: what it is sent, what it refuses, and how it is waited for."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.fakes import by_id, codes, text_of

from batchwright.errors import EndpointError, InputError, InvalidRequest, ResumeRefused, RunFailed
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.run import run
from batchwright.request import SamplingParams


class Endpoint(ThreadingHTTPServer):
    """Says prompts in capitals. `faults` gives the status of a refusal of a prompt, or None."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.faults: Callable[[str], int | None] = lambda prompt: None
        self.error: dict[str, Any] | None = None
        """The error object of refusals; None: one that names the prompt."""
        self.headers: dict[str, str] = {}
        """Further headers of answers."""
        self.pause: str | None = "1"
        """Milliseconds after which it wants to be asked again."""
        self.has_nothing = False
        self.nothing: dict[str, Any] = {"detail": "Not Found"}
        """What it says then."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "far"}, {"id": "further"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if self.path.endswith("/embeddings"):
            self._send(200, {"object": "list", "data": [{"index": 0, "embedding": [1.0]}], "usage": {}})
            return
        status = self.server.faults(body["prompt"])
        if status is not None:
            told = {"message": f"no {body['prompt']}", "type": "t", "code": "c", "param": "prompt"}
            error = self.server.error or told
            self._send(status, {"error": error})
            return
        choice = {"index": 0, "text": body["prompt"].upper(), "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        self._send(200, {"id": "x", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        if self.server.has_nothing:
            status, body = 404, self.server.nothing
        content = json.dumps(body).encode()
        self.send_response(status)
        if self.server.pause is not None:
            self.send_header("retry-after-ms", self.server.pause)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


@contextmanager
def serving(port: int = 0) -> Iterator[Endpoint]:
    with Endpoint(port) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as server:
        yield server


def lines(path: Path, *bodies: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def test_lines_are_sent_as_they_are(tmp_path: Path, endpoint: Endpoint) -> None:
    vector = {"custom_id": "v", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a", "model": "further"}}
    source = lines(tmp_path / "in.jsonl", {"prompt": "a", "id": "p", "tools": [], "suffix": "z", "priority": 1}, vector)
    report = run(source, tmp_path / "out.jsonl", backend=endpoint.url)
    results = by_id(tmp_path / "out.jsonl")
    assert text_of(results["p"]) == "A"
    assert results["v"]["response"]["body"]["data"][0]["embedding"] == [1.0]
    assert sorted(endpoint.asked, key=str) == [
        {"input": "a", "model": "further"},
        {"prompt": "a", "tools": [], "suffix": "z", "model": "far"},
    ]
    assert (report.succeeded, report.prompt_tokens, report.generated_tokens, report.steps) == (2, 1, 2, 0)


_ONLY_REMOTE = """
import re, sys
from importlib import metadata

def closure(name, extra, found):
    for line in metadata.requires(name) or ():
        wanted = re.search(r"extra == .(\\w+)", line)
        other = re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-")
        if other not in found and (wanted is None or wanted[1] == extra) and other in installed:
            found.add(other)
            closure(other, None, found)
    return found

modules = metadata.packages_distributions()
installed = {name.lower().replace("_", "-") for names in modules.values() for name in names}
kept = closure("batchwright", "remote", {"batchwright"})
missing = [name for name, owners in modules.items() if not kept & {owner.lower().replace("_", "-") for owner in owners}]
assert {"torch", "fastapi", "apsw", "psutil"} <= {*missing} and not {"typer", "aiohttp"} & {*missing}
sys.modules.update(dict.fromkeys(name for name in missing if name.isidentifier()))
from batchwright.cli.main import main
main()
"""


def test_the_extra_remote_is_all_that_it_needs(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", {"prompt": "a", "id": "p"})
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--backend", endpoint.url]
    done = subprocess.run([sys.executable, "-c", _ONLY_REMOTE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert text_of(by_id(tmp_path / "out.jsonl")["p"]) == "A"


def test_defaults_are_sent_where_they_were_asked_for(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", {"prompt": "a", "max_completion_tokens": 3}, {"prompt": "b", "logprobs": 1})
    defaults = SamplingParams(max_tokens=9, temperature=0.0, stop=("x",), logit_bias={5: 1.0}, logprobs=2)
    run(source, tmp_path / "out.jsonl", backend=endpoint.url, model="further", defaults=defaults)
    common = {"temperature": 0.0, "stop": ["x"], "logit_bias": {"5": 1.0}, "model": "further"}
    assert sorted(endpoint.asked, key=lambda body: str(body["prompt"])) == [
        {"prompt": "a", "max_completion_tokens": 3, "logprobs": 2, **common},
        {"prompt": "b", "logprobs": 1, "max_tokens": 9, **common},
    ]


def test_defaults_given_by_name_are_sent_whatever_their_values(tmp_path: Path, endpoint: Endpoint) -> None:
    source, output = lines(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl"
    run(source, output, backend=endpoint.url, defaults={"temperature": 1.0})
    assert endpoint.asked == [{"prompt": "a", "model": "far", "temperature": 1.0}]
    with pytest.raises(ResumeRefused, match="sent_defaults"):
        run(source, output, backend=endpoint.url)
    with pytest.raises(InvalidRequest, match="'temprature': choose from max_tokens"):
        run(source, output, backend=endpoint.url, defaults={"temprature": 1.0})


def test_a_refused_key_ends_the_run(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", *({"prompt": name} for name in ("a", "b", "c", "d")))
    output = tmp_path / "out.jsonl"
    for status in (401, 403):
        endpoint.faults = lambda prompt, status=status: status  # type: ignore[misc]
        with pytest.raises(RunFailed, match="does not accept the API key"):
            run(source, output, backend=endpoint.url, backend_api_key="k", model="m", backend_concurrency=1)
        assert not output.read_bytes()
    endpoint.faults = lambda prompt: 403 if prompt == "c" else None
    report = run(source, output, backend=endpoint.url, model="m", backend_concurrency=1)
    assert (report.succeeded, report.failed) == (3, 1)


def test_an_answer_that_makes_no_sense_is_asked_for_five_times(tmp_path: Path, endpoint: Endpoint) -> None:
    endpoint.faults = lambda prompt: 200
    report = run(lines(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl", backend=endpoint.url)
    assert (codes(report), len(endpoint.asked)) == ({"endpoint_error": 1}, 5)


def test_no_line_asks_for_a_stream(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", {"prompt": "a", "stream": True, "id": "a"})
    run(source, tmp_path / "out.jsonl", backend=endpoint.url)
    assert by_id(tmp_path / "out.jsonl")["a"]["error"]["param"] == "stream"
    assert not endpoint.asked


def test_why_lines_wait_is_shown(tmp_path: Path, endpoint: Endpoint) -> None:
    shown: list[str] = []

    def look(progress: RunProgress) -> None:
        if progress.waiting:
            shown.append(progress.waiting)

    endpoint.faults = lambda prompt: None if shown else 503
    run(lines(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl", backend=endpoint.url, progress=look)
    assert shown[0] == f"1 to be tried again, the last after: {endpoint.url} answered 503: no a"


def test_what_may_pass_is_tried_again_and_the_rest_is_told(tmp_path: Path, endpoint: Endpoint) -> None:
    statuses = {"busy": [429, 503], "bad": [400], "unknown": [404]}
    endpoint.faults = lambda prompt: statuses[prompt].pop(0) if statuses.get(prompt) else None
    source = lines(tmp_path / "in.jsonl", *({"prompt": name, "id": name} for name in [*statuses, "fine"]))
    report = run(source, tmp_path / "out.jsonl", backend=endpoint.url)
    results = by_id(tmp_path / "out.jsonl")
    assert {name for name, line in results.items() if line["error"] is None} == {"busy", "fine"}
    assert results["bad"]["error"] == {
        "code": "c",
        "message": "no bad",
        "param": "prompt",
        "line": 2,
        "retryable": False,
    }
    assert codes(report) == {"c": 2}


def test_a_model_that_the_endpoint_does_not_have(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", {"prompt": "a", "model": "gpt", "id": "a"})
    assert codes(run(source, tmp_path / "out.jsonl", backend=endpoint.url)) == {"model_not_found": 1}
    run(source, tmp_path / "any.jsonl", backend=endpoint.url, served_model_names=["*"])
    assert by_id(tmp_path / "any.jsonl")["a"]["response"]["body"]["model"] == "gpt"
    assert endpoint.asked == [{"prompt": "a", "model": "far"}]


def test_an_endpoint_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", *({"prompt": f"p{number}"} for number in range(8)))
    again: list[Any] = []
    with serving() as first:
        port = first.server_port
        first.faults = lambda prompt: 503
        stopped = threading.Event()

        def watch(progress: RunProgress) -> None:
            if first.asked and not stopped.is_set():
                first.shutdown()
                first.server_close()
                stopped.set()
            if progress.waiting and not again:
                manager = serving(port)
                manager.__enter__()
                again.append(manager)

        try:
            report = run(source, tmp_path / "out.jsonl", backend=first.url, backend_concurrency=2, progress=watch)
        finally:
            for manager in again:
                manager.__exit__(None, None, None)
    assert again
    assert (report.succeeded, report.failed) == (8, 0)


def test_what_is_no_endpoint_is_told_before_anything_is_written(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", {"prompt": "a"})
    with serving() as server:
        url = server.url
    for model in (None, "m"):
        with pytest.raises(EndpointError, match="gave no answer"):
            run(source, tmp_path / "out.jsonl", backend=url, model=model)
    with pytest.raises(InputError, match=r"^backend must be the http:// .* is http://nowhere/v1 meant\?$"):
        run(source, tmp_path / "out.jsonl", backend="nowhere")
    with pytest.raises(InputError, match=r"^also must be .* such as https://host/v1$"):
        run(source, tmp_path / "out.jsonl", backend=url, also=[("ftp://nowhere", None)])
    with pytest.raises(InputError, match=r"also='http://.*/': this address is given twice with the same key"):
        run(source, tmp_path / "out.jsonl", backend=url, also=[(url + "/", None)])
    with pytest.raises(InputError, match="dtype='float32' with backend"):
        run(source, tmp_path / "out.jsonl", backend=url, dtype="float32")
    with pytest.raises(InputError, match="embedding_model='minilm' with backend"):
        run(source, tmp_path / "out.jsonl", backend=url, embedding_model="minilm")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_address_at_which_there_is_nothing_ends_the_run(tmp_path: Path, endpoint: Endpoint) -> None:
    source = lines(tmp_path / "in.jsonl", *({"prompt": name} for name in ("a", "b")))
    endpoint.has_nothing = True
    with pytest.raises(EndpointError, match=r"there is no /models at .* name the one to ask with --model"):
        run(source, tmp_path / "out.jsonl", backend=endpoint.url)
    with pytest.raises(RunFailed, match="answered 404: Not Found; there is no /completions at this address"):
        run(source, tmp_path / "out.jsonl", backend=endpoint.url, model="m", backend_concurrency=1)


@pytest.mark.parametrize(
    "error",
    [
        {"message": "Invalid URL (POST /completions)", "type": "invalid_request_error", "code": None},
        {"message": "there is nothing at POST /completions", "type": "invalid_request_error", "code": "unknown_url"},
        {"message": "File Not Found", "type": "not_found_error", "code": 404},
    ],
    ids=["openai", "batchwright", "llama.cpp"],
)
def test_an_api_whose_address_lacks_its_version_ends_the_run(
    error: dict[str, Any], tmp_path: Path, endpoint: Endpoint
) -> None:
    source = lines(tmp_path / "in.jsonl", *({"prompt": name} for name in "abcdefgh"))
    endpoint.has_nothing, endpoint.nothing = True, {"error": error}
    address = endpoint.url.removesuffix("/v1")
    with pytest.raises(EndpointError, match=rf"there is no /models at .* is {address}/v1 meant\?"):
        run(source, tmp_path / "out.jsonl", backend=address)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    with pytest.raises(RunFailed, match=rf"there is no /completions at this address .* is {address}/v1 meant\?"):
        run(source, tmp_path / "out.jsonl", backend=address, model="m", backend_concurrency=1)
    assert len(endpoint.asked) == 1


def test_retries_leave_no_trace_among_the_results(tmp_path: Path, endpoint: Endpoint) -> None:
    tried: list[str] = []
    endpoint.faults = lambda prompt: tried.append(prompt) or (503 if len(tried) < 3 else None)  # type: ignore[func-returns-value]
    source = lines(tmp_path / "in.jsonl", {"prompt": "a", "id": "p"})
    command = [sys.executable, "-m", "batchwright", "run", str(source), "-o", "-", "-q", "--backend", endpoint.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(tried) == 3
    assert [json.loads(line)["custom_id"] for line in done.stdout.splitlines()] == ["p"]
