"""`batchwright batches` with a provider on loopback: its dialect, and where its keys come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.inference.batch_provider import Batch, BatchServer, provider
from tests.jobs.test_backend import serving
from typer.testing import CliRunner, Result

from batchwright.cli.batches import app


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchServer]:
    for name in ("BATCHWRIGHT_BACKEND_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with provider() as running:
        running.batches["batch_1"] = Batch("batch_1", [], 0.0)
        yield running


def command(server: BatchServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--backend", server.url])


def test_the_dialect_of_anthropic(server: BatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "theirs")
    monkeypatch.setenv("OPENAI_API_KEY", "another's")
    listed = command(server, "list", "--dialect", "anthropic", "--json")
    assert listed.exit_code == 0, listed.output
    assert json.loads(listed.stdout)["endpoint"] == "/v1/messages"
    assert command(server, "show", "batch_1", "--dialect", "anthropic").exit_code == 0
    assert command(server, "cancel", "batch_1", "--dialect", "anthropic").exit_code == 0
    assert {(each.get("x-api-key"), each.get("authorization")) for each in server.headers} == {("theirs", None)}


def test_where_the_key_comes_from(server: BatchServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "usual")
    monkeypatch.setenv("NAMED", "named")
    file = tmp_path / "key"
    file.write_text("from a file\n")
    file.chmod(0o600)
    for arguments in ([], ["--api-key-env", "NAMED"], ["--api-key-file", str(file)]):
        assert command(server, "list", *arguments).exit_code == 0
    assert [*dict.fromkeys(each["authorization"] for each in server.headers)] == [
        "Bearer usual",
        "Bearer named",
        "Bearer from a file",
    ]
    file.chmod(0o644)
    assert "other users may read it" in command(server, "list", "--api-key-file", str(file)).output


def test_an_endpoint_without_batches_is_told() -> None:
    with serving() as endpoint:
        endpoint.has_nothing = True
        for arguments in (["list"], ["show", "batch_1"]):
            result = CliRunner().invoke(app, [*arguments, "--backend", endpoint.url])
            assert str(result.exception).startswith(f"{endpoint.url} has no batch API (it answered 404)")
