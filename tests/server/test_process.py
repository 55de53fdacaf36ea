"""`batchwright serve` as a process: starting, stopping, and its errors when it cannot start."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from pathlib import Path
from threading import Thread

import httpx2
import openai
import pytest
from tests.server.served import LIMIT, Endpoint, Process, ended, serving

_HALF_SENT = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
)


def test_it_serves_drains_at_sigterm_and_ends_with_status_0(tmp_path: Path, endpoint: Endpoint) -> None:
    async def main(process: Process, url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT) as http:
            for path in ("/health", "/ready", "/metrics"):
                looked, told = await http.head(path), await http.get(path)
                assert (looked.status_code, looked.content, told.status_code) == (200, b"", 200)
            half = await asyncio.open_connection("127.0.0.1", httpx2.URL(url).port)
            half[1].write(_HALF_SENT)
            answer = await http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
            assert (answer.json()["choices"][0]["text"], answer.headers["x-request-id"]) == ("done", "mine-1")
            endpoint.asked.clear()
            endpoint.answer.clear()
            inside = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
            await asyncio.to_thread(endpoint.asked.wait, LIMIT)
            process.send_signal(signal.SIGTERM)
            while (ready := await http.get("/ready")).status_code == 200:
                pass
            assert (ready.status_code, ready.json()["error"]["code"]) == (503, "not_ready")
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
            endpoint.answer.set()
            assert (await inside).json()["choices"][0]["text"] == "done"
            head, _, body = (await half[0].read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503")
            assert json.loads(body)["error"]["code"] == "shutting_down"
            half[1].close()

    with serving(tmp_path, "--backend", endpoint.url) as (process, url, log):
        asyncio.run(main(process, url))
    assert process.returncode == 0
    events = [each["event"] for each in log]
    assert events[-1] == "stopped"
    assert "draining" in events
    requests = [each for each in log if each["event"] == "request" and each["request_id"] == "mine-1"]
    assert [(each["path"], each["status"]) for each in requests] == [("/v1/completions", 200)]


def test_what_was_not_done_is_done_after_the_next_start(tmp_path: Path, endpoint: Endpoint) -> None:
    body = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}

    def ask(url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    endpoint.answer.clear()
    with serving(tmp_path, "--backend", endpoint.url, "--drain-grace", "0", fork=True) as (process, url, _):
        client = ask(url)
        file = client.files.create(file=("in.jsonl", json.dumps(body).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert endpoint.asked.wait(LIMIT)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    endpoint.answer.set()
    with serving(tmp_path, "--backend", endpoint.url, fork=True) as (process, url, _):
        client = ask(url)
        while (done := client.batches.retrieve(batch.id)).status != "completed":
            time.sleep(0.02)
        assert done.output_file_id is not None
        assert b'"done"' in client.files.content(done.output_file_id).content
        process.send_signal(signal.SIGTERM)


def test_an_endpoint_that_is_down_at_the_start_is_waited_for(tmp_path: Path, endpoint: Endpoint) -> None:
    port = endpoint.server_port
    endpoint.server_close()

    async def until(http: httpx2.AsyncClient, status: int) -> httpx2.Response:
        while (answer := await http.get("/ready")).status_code != status:  # noqa: ASYNC110  (another process changes it)
            await asyncio.sleep(0.02)
        return answer

    async def main(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=LIMIT) as http, asyncio.timeout(LIMIT):
            told = (await until(http, 503)).json()["error"]["message"]
            assert told == "the endpoint does not answer"
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "endpoint_down")
            assert int(refused.headers["retry-after"]) >= 1
            assert str(port) not in refused.text
            assert (await http.get("/v1/models")).json()["data"] == []
            back = Endpoint(port)
            Thread(target=back.serve_forever, daemon=True).start()
            await until(http, 200)
            assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["far"]
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            back.shutdown()
            back.server_close()

    with serving(tmp_path, "--backend", f"http://127.0.0.1:{port}/v1", fork=True) as (process, url, log):
        asyncio.run(main(url))
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert any(str(port) in each["event"] for each in log), "the log has the address"


def test_an_upload_past_the_cap_is_answered_over_a_real_connection(tmp_path: Path, endpoint: Endpoint) -> None:
    with serving(tmp_path, "--backend", endpoint.url, "--max-file-size", "100kB", fork=True) as (process, url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("in.jsonl", b"x\n" * 5_000_000), purpose="batch")
        assert caught.value.status_code == 413
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("flags", "status", "told"),
    [
        (("--host", "0.0.0.0"), 2, "make one in this store: batchwright keys create NAME"),
        (("--host", "no.such.host.invalid"), 1, "there is no such address"),
        (("--model", "no-such-model"), 2, "no-such-model"),
        (
            ("--backend", "http://me:hunter2@127.0.0.1:1/v1"),
            2,
            "--backend: contains a user name or a password: leave them out and give the key as backend_api_key",
        ),
        (
            ("--backend", "http://127.0.0.1:1/v1", "--backend-concurrency", "999999999"),
            2,
            "lower it, or raise the limit",
        ),
        (("--backend-api-key", "hunter2"), 2, "--backend-api-key-file"),
        (("--backend-api-key=hunter2",), 2, "--backend-api-key is no flag any more"),
        (("--max-lines", "many"), 2, "--max-lines='many'"),
        (("--kv-memory", "much"), 2, "--kv-memory='much'"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(
    tmp_path: Path, flags: tuple[str, ...], status: int, told: str
) -> None:
    got, printed = ended(tmp_path, "--port", "0", *flags)
    last = printed.splitlines()[-1]
    assert (got, last.startswith("error: ")) == (status, True), printed
    assert told in last
    assert "hunter2" not in printed


def test_a_port_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, printed = ended(tmp_path, "--port", str(port))
    assert status == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another with --port" in printed
