"""`batchwright jobs`, without HTTP, with a worker that has an endpoint elsewhere compute."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stamina.instrumentation import RetryDetails, get_on_retry_hooks
from tests.service.support import line
from typer.testing import CliRunner, Result

from batchwright.cli.jobs import SOME_FAILED
from batchwright.cli.main import app
from batchwright.cli.store_options import StoreFlags, settings_with
from batchwright.errors import Conflict, InputError, InvalidRequest, NotFound, StoreMismatch, StoreUnavailable


class _Endpoint(BaseHTTPRequestHandler):
    """Says the prompt in capitals; refuses one that is "no"."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "model", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == "no":
            self._answer(400, {"error": {"message": "never", "type": "invalid_request_error", "param": "prompt"}})
            return
        choices = [{"index": 0, "text": body["prompt"].upper(), "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        self._answer(200, {"id": "cmpl", "object": "text_completion", "choices": choices, "usage": usage})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _logs() -> Iterator[None]:
    """`jobs work` sets the logs of its process up, which is ours here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of all commands of a test."""
    monkeypatch.setenv("BATCHWRIGHT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "data"


def jobs(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["jobs", *arguments], catch_exceptions=False)


def input_file(folder: Path, prompts: Sequence[str]) -> str:
    path = folder / "input.jsonl"
    path.write_bytes(b"".join(map(line, prompts)))
    return str(path)


def shown(batch_id: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(jobs("show", batch_id, "--json").stdout)
    return result


def test_a_batch_from_a_file_to_its_results(tmp_path: Path, data: Path, endpoint: str) -> None:
    submitted = jobs("submit", input_file(tmp_path, ["a", "no", "c"]), "--metadata", "kind=test", "--window", "2h")
    batch_id = submitted.stdout.strip()
    assert submitted.exit_code == 0
    assert shown(batch_id)["status"] == "validating"
    assert jobs("results", batch_id).stdout == ""
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    batch = shown(batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert (batch["metadata"], batch["completion_window"]) == ({"kind": "test"}, "2h")
    output = tmp_path / "results.jsonl"
    assert jobs("results", batch_id, "-o", str(output)).exit_code == 0
    lines = [msgspec.json.decode(each) for each in output.read_bytes().splitlines()]
    assert [each["custom_id"] for each in lines] == ["id-a", "id-c", "id-no"]
    assert lines[2]["response"]["status_code"] == 400
    assert jobs("results", batch_id).stdout.encode() == output.read_bytes()
    assert batch_id in jobs("list").stdout
    assert "2 succeeded, 1 failed" in jobs("show", batch_id).stdout
    assert "retry of" in jobs("retry", batch_id).stdout


def test_identical_lines_are_asked_once(tmp_path: Path, data: Path, endpoint: str) -> None:
    path = tmp_path / "input.jsonl"
    body = {"model": "model", "prompt": "a", "temperature": 0}
    path.write_bytes(b"".join(line("a", f"id-{number}", body=body) for number in range(6)))
    batch_id = jobs("submit", str(path)).stdout.strip()
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    batch = shown(batch_id)
    assert (batch["request_counts"]["completed"], batch["usage"]["total_tokens"]) == (6, 3)
    answers = [msgspec.json.decode(each)["response"]["body"] for each in jobs("results", batch_id).stdout.splitlines()]
    assert {each["choices"][0]["text"] for each in answers} == {"A"}
    assert sum("deduplicated" not in each["usage"] for each in answers) == 1


def test_what_is_wrong_with_an_input_is_told_by_line(tmp_path: Path, data: Path, endpoint: str) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(line("a") + b"{}\n")
    batch_id = jobs("submit", str(path)).stdout.strip()
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    assert "line 2: " in jobs("show", batch_id).stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the file is empty"), (b"product,feature\n", "batchwright run"), (b'{"prompt": "x"}\n', "batchwright run")],
    ids=["empty", "table", "prompts"],
)
def test_what_is_no_batch_input_is_told_before_the_upload(
    tmp_path: Path, data: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        jobs("submit", str(path))
    assert not (data / "batchwright.db").exists()


@pytest.mark.parametrize("first", [b"", b" \r\n"], ids=["at once", "blank"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, data: Path, endpoint: str, first: bytes) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + first + line("a") + line("b"))
    submitted = jobs("submit", str(path))
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    assert shown(submitted.stdout.strip())["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


def test_tries_that_are_repeated_are_not_told_among_the_results(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings_with(StoreFlags(data))
    (tell,) = get_on_retry_hooks()
    for error in (StoreUnavailable("it is locked"), OSError("refused")):
        tell(RetryDetails("x", (), {}, 1, 0.1, 0.0, error))
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "it is locked; trying again\n")


def test_waiting_for_the_end_beside_a_worker_that_is_then_stopped(tmp_path: Path, data: Path, endpoint: str) -> None:
    command = [sys.executable, "-m", "batchwright", "jobs", "work", "--backend", endpoint]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as worker:
        try:
            waited = jobs("submit", input_file(tmp_path, ["a", "no"]), "--wait")
            assert waited.exit_code == SOME_FAILED
            assert "1 succeeded, 1 failed" in waited.stdout
            refused = jobs("submit", input_file(tmp_path, ["a"]), "--wait", "--json", "--endpoint", "/v1/embeddings")
            assert refused.exit_code == 1
            assert json.loads(refused.stdout)["errors"]["data"][0]["code"] == "invalid_url"
        finally:
            worker.terminate()
            worker.communicate()
        assert worker.returncode == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_worker_that_is_stopped_before_all_is_done_says_so(
    tmp_path: Path, data: Path, number: signal.Signals, status: int
) -> None:
    jobs("submit", input_file(tmp_path, ["a"]))
    nobody = ["--backend", "http://127.0.0.1:9/v1"]
    command = [sys.executable, "-m", "batchwright", "jobs", "work", "--until-idle", *nobody]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        try:
            assert any("working on batches" in each for each in worker.stderr)
        finally:
            worker.send_signal(number)
            worker.communicate()
        assert worker.returncode == status


def test_pausing_resuming_and_cancelling(tmp_path: Path, data: Path, endpoint: str) -> None:
    batch_id = jobs("submit", input_file(tmp_path, ["a"])).stdout.strip()
    assert "validating (paused)" in jobs("pause", batch_id).stdout
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    assert shown(batch_id)["request_counts"]["completed"] == 0
    assert "paused" not in jobs("resume", batch_id).stdout
    assert json.loads(jobs("cancel", batch_id, "--json").stdout)["status"] == "cancelling"
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    assert shown(batch_id)["status"] == "cancelled"
    for command in ("pause", "resume", "cancel"):
        with pytest.raises(Conflict, match=rf"has ended \(it is cancelled\): there is nothing to {command}"):
            jobs(command, batch_id)


def test_a_store_is_made_by_submit_alone_and_that_is_said(tmp_path: Path, data: Path) -> None:
    for command in (("list",), ("show", "batch_0"), ("cancel", "batch_0"), ("results", "batch_0")):
        with pytest.raises(InputError, match=f"there is no store at {data / 'batchwright.db'}: see to --data"):
            jobs(*command)
    assert not data.exists()
    assert f"made a new store at {data / 'batchwright.db'}" in jobs("submit", input_file(tmp_path, ["a"])).stderr
    assert "new store" not in jobs("submit", input_file(tmp_path, ["a"])).stderr


def test_a_wrong_database_beside_files_is_refused_by_every_command(tmp_path: Path, data: Path, endpoint: str) -> None:
    batch_id = jobs("submit", input_file(tmp_path, ["a"])).stdout.strip()
    [file] = (data / "files").glob("??/file-*")
    other = tmp_path / "other"
    jobs("submit", input_file(tmp_path, ["b"]), "--data", str(other))
    commands = (["submit", input_file(tmp_path, ["c"])], ["list"], ["show", batch_id], ["results", batch_id])
    for command in (*commands, ["work", "--until-idle", "--backend", endpoint]):
        with pytest.raises(StoreMismatch, match=r"no store at .*typo.db, or it is empty, and .* is that of another"):
            jobs(*command, "--database", str(tmp_path / "typo.db"))
        with pytest.raises(StoreMismatch, match="are those of store"):
            jobs(*command, "--database", str(other / "batchwright.db"))
    for database, told in ((tmp_path / "typo.db", "no store at"), (other / "batchwright.db", "are those of store")):
        for words in (["keys", "create", "x"], ["quotas", "set", "--tenant", "x", "enqueued_lines=1"]):
            with pytest.raises(StoreMismatch, match=told):
                CliRunner().invoke(app, [*words, "--database", str(database)], catch_exceptions=False)
    assert not (tmp_path / "typo.db").exists()
    assert jobs("work", "--until-idle", "--backend", endpoint).exit_code == 0
    assert file.exists()
    assert shown(batch_id)["status"] == "completed"


def test_what_was_put_together_on_purpose_is_adopted(tmp_path: Path, data: Path) -> None:
    batch_id = jobs("submit", input_file(tmp_path, ["a"])).stdout.strip()
    other = tmp_path / "other"
    jobs("submit", input_file(tmp_path, ["b"]), "--data", str(other))
    (other / "batchwright.db").replace(data / "batchwright.db")
    with pytest.raises(StoreMismatch, match="jobs adopt"):
        jobs("list")
    assert "of the 1 files in the folder the database knows 0" in jobs("adopt").stdout
    assert batch_id not in jobs("list").stdout
    with pytest.raises(InputError, match="there is no store at"):
        jobs("adopt", "--database", str(tmp_path / "typo.db"))


def test_settings_may_come_from_a_file(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCHWRIGHT_DATA")
    config = tmp_path / "named.toml"
    config.write_text(f'data = "{data}"\nmax_lines = 1\n')
    batch_id = jobs("submit", input_file(tmp_path, ["a"]), "--config", str(config)).stdout.strip()
    assert batch_id in jobs("list", "--data", str(data)).stdout
    with pytest.raises(InvalidRequest, match="more than 1 lines"):
        jobs("submit", input_file(tmp_path, ["a", "b"]), "--config", str(config))


def test_mistakes_are_told(tmp_path: Path, data: Path) -> None:
    jobs("submit", input_file(tmp_path, ["a"]))
    with pytest.raises(NotFound):
        jobs("show", "batch_0")
    path = tmp_path / "prompts.txt"
    path.write_text("hello\n")
    with pytest.raises(InputError, match="--endpoint"):
        jobs("submit", str(path))
    assert jobs("submit", input_file(tmp_path, ["a"]), "--metadata", "novalue").exit_code == 2
