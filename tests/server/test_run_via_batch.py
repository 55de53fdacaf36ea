"""`run --via batch` and `batches` against the service itself, looked at with the official client."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from tests.jobs.fakes import by_id, text_of
from tests.server.served import Endpoint, serving
from typer.testing import CliRunner, Result

from batchwright.backoff import Backoff
from batchwright.cli.main import app
from batchwright.errors import BatchwrightError
from batchwright.inference.batches import provider_batches
from batchwright.inference.batches.times import BatchTimes
from batchwright.jobs.job_run import RunInterrupted, RunProgress
from batchwright.jobs.run import run
from batchwright.submitting.looking import LookPauses


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_service_is_a_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = BatchTimes(patience=0.05, looks=LookPauses(0.02, 0.05, 0.05), retries=Backoff(0.05, 0.2))
    monkeypatch.setattr(provider_batches, "BatchTimes", lambda: quick)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"p{number}" for number in range(40)]
    source.write_text("".join(json.dumps({"id": each, "prompt": each}) + "\n" for each in prompts))
    endpoint = Endpoint()
    Thread(target=endpoint.serve_forever, daemon=True).start()
    endpoint.answer.clear()
    data = tmp_path / "data"
    data.mkdir()
    with serving(data, "--backend", endpoint.url, fork=True) as (process, url, _):
        base = f"{url}/v1"
        client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)

        def leave(progress: RunProgress) -> None:
            if endpoint.asked.is_set() and progress.waiting and "1 batch at the provider" in progress.waiting:
                raise KeyboardInterrupt

        with pytest.raises(RunInterrupted) as interruption:
            run(source, output, backend=base, via="batch", progress=leave)
        report: Any = interruption.value.report
        [left] = report.batches["at_provider"]

        # What lies there is what the official client would have put there.
        [batch] = client.batches.list()
        assert batch.id == left
        assert (batch.endpoint, batch.completion_window, batch.status) == ("/v1/completions", "24h", "in_progress")
        assert batch.metadata is not None
        uploaded = client.files.retrieve(batch.input_file_id)
        assert (uploaded.purpose, uploaded.filename) == ("batch", f"batchwright-{batch.metadata['batchwright']}.jsonl")
        lines = [json.loads(line) for line in client.files.content(uploaded.id).text.splitlines()]
        assert [line["body"]["prompt"] for line in lines] == prompts
        assert {(line["method"], line["url"], line["body"]["model"]) for line in lines} == {
            ("POST", "/v1/completions", "far")
        }
        listed = command("batches", "list", "--backend", base)
        assert f"{left}  in_progress" in listed.stdout, listed.stderr
        shown = command("batches", "show", left, "--backend", base, "--json")
        assert json.loads(shown.stdout)["mark"] == batch.metadata["batchwright"]

        # Cancelled from outside, its lines go into another one.
        cancelled = command("batches", "cancel", left, "--backend", base)
        assert (cancelled.exit_code, cancelled.stdout.split(":")[0]) == (0, left), cancelled.stderr
        endpoint.answer.set()
        whole = run(source, output, backend=base, via="batch")
        assert {name: text_of(line) for name, line in by_id(output).items()} == dict.fromkeys(prompts, "done")
        assert whole.batches is not None
        assert whole.batches["resumed"] == 1
        assert not (tmp_path / "out.jsonl.batches").exists()
        with pytest.raises(BatchwrightError, match="batch_none"):
            command("batches", "cancel", "batch_none", "--backend", base)
        process.terminate()
    endpoint.shutdown()
    endpoint.server_close()
