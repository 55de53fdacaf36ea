"""The HTTP tier of the batching benchmark: what is sent, what counts as right, a whole comparison of a small server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.batching.device import Cost
from benchmarks.batching.http import report, run
from benchmarks.batching.http.load import Generator, Load
from benchmarks.batching.http.run import Scenario, compare, summarise
from benchmarks.batching.http.server import ROOT
from benchmarks.batching.http.servers import HOST, VARIABLE, Model, PoisonError, Spec
from benchmarks.batching.http.systems import SYSTEMS, WIRES, HttpSystem
from benchmarks.batching.workload import Job

ANSWERS = {
    "predict": b'{"id": 7}',
    "mosec": b'{\n  "id": 7\n}',
    "bentoml": b"[7]",
    "triton": b'{"outputs": [{"name": "id", "datatype": "INT64", "shape": [1, 1], "data": [7]}]}',
}
SPEC = Spec(port=1, alpha=0.0, beta=0.0, max_batch_size=2, settings={"wait": 5})

SERVER = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
from benchmarks.batching.http.server import ROOT
from benchmarks.batching.http.servers import HOST, Model, Spec

spec = Spec.read()
model = Model(spec)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"id": model.compute([request])[0]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer((HOST, spec.port), Handler).serve_forever()
"""


@pytest.mark.parametrize("name", WIRES)
def test_each_server_is_told_the_request_and_its_answer_is_understood(name: str) -> None:
    body = json.loads(WIRES[name].encode(Job(ident=7, at=0.0, length=64, limit=1.0, poison=True)))
    if name == "triton":
        assert {each["name"]: each["data"] for each in body["inputs"]} == {"id": [7], "length": [64], "poison": [1]}
    else:
        request = body["items"][0] if name == "bentoml" else body
        assert request == {"id": 7, "length": 64, "poison": True, "limit": 1.0}
    assert WIRES[name].decode(ANSWERS[name]) == 7


def test_every_system_has_a_wire_and_a_server() -> None:
    for system in SYSTEMS:
        assert system.wire in WIRES
        assert (ROOT / (system.module.replace(".", "/") + ".py")).exists()


def test_a_server_learns_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SPEC.environment()[VARIABLE])
    assert Spec.read() == SPEC


def test_the_model_of_the_servers() -> None:
    request: dict[str, Any] = {"id": 3, "length": 5, "poison": False}
    model = Model(SPEC)
    assert model.compute([request, request | {"id": 4}]) == [3, 4]
    with pytest.raises(PoisonError):
        model.compute([request, request | {"poison": True}])
    with pytest.raises(ValueError, match="batch of 3"):
        model.compute([request] * 3)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that does by each request what its length says."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        request = json.loads(await reader.readexactly(size))
        if request["length"] == 1:
            break
        if request["length"] == 2:
            await reader.read()
            break
        status, ident = {3: (503, 0), 4: (500, 0), 5: (200, -1)}.get(request["length"], (200, request["id"]))
        body = json.dumps({"id": ident}).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
    writer.close()


async def _send(jobs: list[Job]) -> tuple[list[float], Generator]:
    server = await asyncio.start_server(_answer, HOST, 0)
    generator = Generator(server.sockets[0].getsockname()[1], WIRES["predict"])
    latencies, lags = await generator.send(jobs)
    assert len(lags) == len(jobs)
    server.close()
    return latencies, generator


BROKEN, SILENT, REFUSED, FAILED, WRONG, RIGHT = range(1, 7)


@pytest.mark.parametrize(
    ("length", "trouble"),
    [(BROKEN, "broken"), (SILENT, "late"), (REFUSED, "refused"), (FAILED, "failed"), (WRONG, "wrong")],
)
def test_what_is_not_the_right_answer_is_a_miss(length: int, trouble: str) -> None:
    limit = 0.001 if length == SILENT else 60.0
    latencies, generator = asyncio.run(_send([Job(0, 0.0, length, limit), Job(1, 0.0, RIGHT, 60.0)]))
    assert latencies[0] == float("inf")
    assert 0 <= latencies[1] <= 60
    assert generator.errors == {trouble: 1}


def test_a_poisoned_request_must_be_answered_with_an_error() -> None:
    jobs = [Job(0, 0.0, FAILED, 60.0, poison=True), Job(1, 0.0, RIGHT, 60.0, poison=True)]
    latencies, generator = asyncio.run(_send(jobs))
    assert latencies[0] <= 60
    assert latencies[1] == float("inf")
    assert generator.errors == {"wrong": 1}


def test_a_caller_who_hangs_up_is_no_error() -> None:
    jobs = [Job(0, 0.0, SILENT, 60.0, leaves_after=0.001), Job(1, 0.0, RIGHT, 60.0)]
    latencies, generator = asyncio.run(_send(jobs))
    assert latencies[1] <= 60
    assert generator.errors == {}


def _load(latencies: list[float | None], in_time: float, errors: dict[str, int]) -> Load:
    return {"latencies": latencies, "in_time": in_time, "errors": errors, "lag": [0.001, 0.002], "cpu": 0.1}


def test_seeds_are_put_together_and_reported() -> None:
    loads = [_load([0.1, 0.3], 1.0, {}), _load([0.2, None], 0.5, {"failed": 1})]
    measured = summarise("some", {"wait": 5}, Scenario("fixed", 0.9), loads)
    assert (measured.requests, measured.p50, measured.p99, measured.mean) == (4, 0.2, None, 0.75)
    assert measured.errors == {"failed": 1}
    page = report.page([measured], seeds=2, seconds=1.0)
    assert "| some (wait=5) | 0.750 (0.500..1.000) |" in page
    assert "1 failed" in page
    assert json.loads(report.figures([measured], 2, 1.0))["results"][0]["in_time"] == [1.0, 0.5]


def _small(monkeypatch: pytest.MonkeyPatch, folder: Path, server: str) -> HttpSystem:
    """A server of our own, on a quick model, in this environment."""
    (folder / "small_server.py").write_text(server)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(run, "COST", Cost(alpha=0.02, beta=0.0))
    monkeypatch.setattr(run, "_WARM_UP_S", 0.005)
    monkeypatch.setattr(run, "python_of", lambda _: Path(sys.executable))
    return HttpSystem("small", "", "small_server", "predict")


def test_a_whole_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = _small(monkeypatch, tmp_path, SERVER)
    port = run.free_port()
    monkeypatch.setattr(run, "free_port", lambda: port)
    said: list[str] = []
    (measured,) = compare([system], [Scenario("fixed", 0.5)], seeds=2, seconds=0.01, say=said.append)
    assert said == ["small {}"]
    assert measured.requests == 2 * 8  # 32 in 20 ms, half of that rate, for 10 ms
    assert measured.errors == {}
    assert measured.p99 is not None
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, port))


def test_a_server_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = _small(monkeypatch, tmp_path, "raise SystemExit('no such setting')")
    said: list[str] = []
    assert not list(compare([system], [Scenario("fixed", 0.5)], seeds=1, seconds=0.01, say=said.append))
    assert "no such setting" in said[-1]


def test_a_server_that_is_not_installed_is_skipped() -> None:
    said: list[str] = []
    system = HttpSystem("absent", "no-such-environment", "none", "predict")
    assert not list(compare([system], [], seeds=1, seconds=1.0, say=said.append))
    assert "setup_batching.sh" in said[0]
