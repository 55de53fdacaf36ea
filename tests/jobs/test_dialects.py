"""`run` with endpoints that speak Anthropic's dialect or answer `/v1/responses`, and where their keys go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from pydantic import TypeAdapter
from tests.jobs.fakes import by_id, codes

from batchwright.errors import RunFailed
from batchwright.jobs.run import run

KEY = "sk-very-secret-0123456789"
_FORM: TypeAdapter[Any] = TypeAdapter(MessageCreateParamsNonStreaming)
_TOOL = {"type": "function", "function": {"name": "shout", "parameters": {"type": "object", "properties": {}}}}


class Provider(ThreadingHTTPServer):
    """Has Anthropic's `/v1/messages` and OpenAI's `/v1/responses`, for those who have the key."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.key = KEY
        self.look: Callable[[], None] = lambda: None
        """Called while a request waits for its answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        if not self._is_welcome():
            return
        self._send(200, {"data": [{"type": "model", "id": "claude", "display_name": "C"}], "has_more": False})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if not self._is_welcome():
            return
        self.server.look()
        if self.path == "/v1/responses":
            self._send(200, _response(body))
        elif self.path == "/v1/messages":
            _FORM.validate_python(body)
            self._send(*_message(body))
        else:
            self._send(404, {"type": "error", "error": {"type": "not_found_error", "message": f"no {self.path}"}})

    def _is_welcome(self) -> bool:
        given = self.headers.get("x-api-key") or (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if given == self.server.key:
            return True
        self._send(401, {"type": "error", "error": {"type": "authentication_error", "message": f"bad key {given}"}})
        return False

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


def _message(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    said = body["messages"][-1]["content"]
    if said == "bad":
        return 400, {"type": "error", "error": {"type": "invalid_request_error", "message": "too bad"}}
    call = {"type": "tool_use", "id": "c", "name": "shout", "input": {"text": said}}
    return 200, {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [call] if body.get("tools") else [{"type": "text", "text": said.upper()}],
        "stop_reason": "tool_use" if body.get("tools") else "end_turn",
        "usage": {"input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 4},
    }


def _response(body: dict[str, Any]) -> dict[str, Any]:
    cut = body.get("max_output_tokens") == 1
    parts = [{"type": "output_text", "text": body["input"].upper(), "annotations": []}]
    return {
        "id": "resp_1",
        "object": "response",
        "model": body["model"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": parts},
        ],
        "usage": {"input_tokens": 5, "output_tokens": 6, "input_tokens_details": {"cached_tokens": 3}},
    }


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": content, "messages": [{"role": "user", "content": content}], **fields}


def responses(text: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": text, "method": "POST", "url": "/v1/responses", "body": {"input": text, **fields}}


def lines(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    return path


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line with nothing in the environment that has a key but what is given."""
    kept = {name: value for name, value in os.environ.items() if "KEY" not in name and "TOKEN" not in name}
    return subprocess.run(
        [sys.executable, "-m", "batchwright", "run", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=kept | environment,
    )


def holds(folder: Path, key: str) -> list[Path]:
    """Files that hold a key."""
    return [path for path in folder.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]


def test_chats_in_anthropics_dialect(tmp_path: Path, provider: Provider) -> None:
    seen: list[str] = []

    def look() -> None:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                seen.append(path.read_bytes().decode(errors="replace"))

    provider.look = look
    source = lines(
        tmp_path / "in.jsonl",
        chat("a", temperature=0.5, deadline_ms=60_000),
        chat("b", tools=[_TOOL], max_tokens=3),
        chat("bad"),
        chat("seeded", seed=1),
        {"custom_id": "plain", "prompt": "x"},
        responses("r"),
    )
    done = command(
        tmp_path, str(source), "-o", "out.jsonl", "--backend", provider.url, "--dialect", "anthropic",
        "--max-tokens", "7", "--report", "report.json", ANTHROPIC_API_KEY=KEY,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    results = by_id(tmp_path / "out.jsonl")
    body = results["a"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "A"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    call = results["b"]["response"]["body"]["choices"][0]["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"text": "b"}
    assert (results["bad"]["error"]["code"], results["bad"]["error"]["message"]) == ("invalid_request_error", "too bad")
    assert results["seeded"]["error"]["param"] == "seed"
    assert "has no counterpart in Anthropic's Messages API" in results["seeded"]["error"]["message"]
    assert "--chat" in results["plain"]["error"]["message"]
    assert results["r"]["error"]["code"] == "unsupported_url"
    first = next(body for body in provider.asked if body["messages"][0]["content"] == "a")
    assert first == {"model": "claude", "max_tokens": 7, "temperature": 0.5, "messages": chat("a")["messages"]}
    assert {(each["x-api-key"], each["anthropic-version"]) for each in provider.headers} == {(KEY, "2023-06-01")}
    assert not any("authorization" in each for each in provider.headers)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["prompt_tokens"], report["generated_tokens"]) == (6, 8)
    assert any("batchwright" in each for each in seen)
    assert not [each for each in seen if KEY in each]
    assert KEY not in done.stdout + done.stderr
    assert not holds(tmp_path, KEY)


def test_a_key_that_is_refused_is_nowhere(tmp_path: Path, provider: Provider) -> None:
    provider.key = "another"
    source = lines(tmp_path / "in.jsonl", chat("a"))
    arguments = (
        str(source),
        "-o",
        "out.jsonl",
        "--backend",
        provider.url,
        "--dialect",
        "anthropic",
        "--model",
        "claude",
    )
    done = command(tmp_path, *arguments, "--max-tokens", "7", "--report", "report.json", ANTHROPIC_API_KEY=KEY)
    assert done.returncode == 1
    assert "401: it does not accept the API key from ANTHROPIC_API_KEY" in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert not holds(tmp_path, KEY)
    done = command(tmp_path, *arguments, "--max-tokens", "7", OPENAI_API_KEY=KEY)
    assert done.returncode == 1
    assert "one was looked for in BATCHWRIGHT_BACKEND_API_KEY and ANTHROPIC_API_KEY" in done.stderr
    assert not any(KEY in str(each) for each in provider.headers[1:])


def test_a_key_from_a_file_or_a_named_variable(tmp_path: Path, provider: Provider) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o644)
    source = lines(tmp_path / "in.jsonl", responses("a"))
    common = (str(source), "--backend", provider.url)
    done = command(tmp_path, *common, "-o", "1.jsonl", "--api-key-file", str(file), OPENAI_API_KEY="wrong")
    assert (done.returncode, f"chmod 600 {file}" in done.stderr) == (0, True)
    done = command(tmp_path, *common, "-o", "2.jsonl", "--api-key-env", "MINE", MINE=KEY, OPENAI_API_KEY="wrong")
    assert done.returncode == 0, done.stderr
    done = command(tmp_path, *common, "-o", "3.jsonl", BATCHWRIGHT_BACKEND_API_KEY=KEY, OPENAI_API_KEY="wrong")
    assert done.returncode == 0, done.stderr
    assert {each["authorization"] for each in provider.headers} == {f"Bearer {KEY}"}
    assert holds(tmp_path, KEY) == [file]


@pytest.mark.parametrize("given", [["--backend-api-key", KEY], [f"--backend-api-key={KEY}"], [f"--api-key={KEY}"]])
def test_a_key_is_no_value_of_a_flag(given: list[str], tmp_path: Path, provider: Provider) -> None:
    source = lines(tmp_path / "in.jsonl", chat("a"))
    done = command(tmp_path, str(source), "-o", "out.jsonl", "--backend", provider.url, *given)
    assert done.returncode == 2
    assert "--api-key-file" in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert not provider.asked


def test_flags_for_an_endpoint_need_one(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", chat("a"))
    done = command(tmp_path, str(source), "-o", "out.jsonl", "--dialect", "anthropic")
    assert (done.returncode, "name it with --backend" in done.stderr) == (2, True)


def test_responses_are_passed_on_as_they_are(tmp_path: Path, provider: Provider) -> None:
    odd = {"model": "claude", "tools": [{"type": "web_search"}], "reasoning": {"effort": "low"}, "store": False}
    source = lines(
        tmp_path / "in.jsonl",
        responses("a", **odd),
        responses("b", max_output_tokens=1),
        responses("c", background=True),
        responses("d", stream=True),
    )
    report = run(source, tmp_path / "out.jsonl", backend=provider.url, backend_api_key=KEY, defaults={"max_tokens": 9})
    results = by_id(tmp_path / "out.jsonl")
    assert results["a"]["response"]["body"]["output"][1]["content"][0]["text"] == "A"
    assert [results[name]["error"]["param"] for name in ("c", "d")] == ["background", "body.stream"]
    assert (report.succeeded, report.prompt_tokens, report.generated_tokens) == (2, 10, 12)
    assert sorted(provider.asked, key=lambda body: str(body["input"])) == [
        {"input": "a", **odd, "max_output_tokens": 9},
        {"input": "b", "model": "claude", "max_output_tokens": 1},
    ]


def test_responses_in_a_table(tmp_path: Path, provider: Provider) -> None:
    source = lines(tmp_path / "in.jsonl", responses("a"), responses("b", max_output_tokens=1))
    run(source, tmp_path / "out.csv", backend=provider.url, backend_api_key=KEY)
    rows = (tmp_path / "out.csv").read_text()
    assert "A,stop,,5,6" in rows
    assert "B,length,,5,6" in rows


def test_a_dry_run_refuses_what_the_dialect_lacks(tmp_path: Path) -> None:
    source = lines(tmp_path / "in.jsonl", chat("a", max_tokens=3, tools=[_TOOL]), chat("b", max_tokens=3, seed=1))
    report = run(source, dry_run=True, backend="http://127.0.0.1:9/v1", backend_dialect="anthropic")
    assert (report.total, report.failed, codes(report)) == (2, 1, {"unsupported_parameter": 1})
    plain = lines(tmp_path / "plain.jsonl", responses("a"), {"custom_id": "p", "prompt": "x"})
    assert run(plain, dry_run=True, backend="http://127.0.0.1:9/v1").failed == 0
    assert run(plain, dry_run=True, backend="http://127.0.0.1:9/v1", backend_dialect="anthropic").failed == 2


def test_from_python_a_key_is_given_or_taken_from_the_environment(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    run(lines(tmp_path / "in.jsonl", responses("a")), tmp_path / "1.jsonl", backend=provider.url, model="claude")
    with pytest.raises(RunFailed, match=r"does not accept the API key\. Finished"):
        run(
            lines(tmp_path / "in.jsonl", responses("a")),
            tmp_path / "2.jsonl",
            backend=provider.url,
            backend_api_key="wrong",
            model="claude",
        )
