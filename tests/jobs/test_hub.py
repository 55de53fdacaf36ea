"""Inputs and outputs in a dataset of a Hugging Face hub, with `huggingface_hub` as the driver."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("huggingface_hub")

import stamina  # noqa: E402
from fsspec.config import conf  # noqa: E402
from huggingface_hub.utils import _http  # noqa: E402

from batchwright.errors import InputError  # noqa: E402
from batchwright.jobs.job_run import RunInterrupted  # noqa: E402
from batchwright.jobs.reading import read_results  # noqa: E402
from batchwright.jobs.remote import results  # noqa: E402
from batchwright.jobs.remote.parts import MANIFEST  # noqa: E402
from batchwright.jobs.run import run  # noqa: E402

from .fakes import fake  # noqa: E402
from .hub import REPOSITORY, Hub, hub_server  # noqa: E402

DATASET = f"hf://datasets/{REPOSITORY}"
COUNT = 40
INPUT = "".join(json.dumps({"custom_id": f"q{n}", "prompt": f"prompt {n}"}) + "\n" for n in range(COUNT)).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(results, "PART_BYTES", 1000)
    monkeypatch.setenv(results.STATE_VARIABLE, str(tmp_path / "state"))
    # Neither our tries nor those of the driver wait for anything.
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
    with hub_server() as server, stamina.set_testing(True, attempts=10, cap=True):
        monkeypatch.setitem(conf, "hf", {"endpoint": server.address, "token": server.token})
        server.files["in.jsonl"] = INPUT
        yield server


def stop(step: int) -> None:
    if step == 20:
        raise KeyboardInterrupt


def test_a_file_and_a_pattern_are_read(hub: Hub, tmp_path: Path) -> None:
    hub.files["parts/1.jsonl"] = b"".join(INPUT.splitlines(keepends=True)[:10])
    hub.files["parts/2.jsonl"] = b"".join(INPUT.splitlines(keepends=True)[10:])
    whole = run(f"{DATASET}/in.jsonl", tmp_path / "out.jsonl", model=fake())
    assert whole.succeeded == COUNT
    parts = run(f"{DATASET}/parts/*.jsonl", tmp_path / "parts.jsonl", model=fake())
    assert parts.succeeded == COUNT
    assert run(f"{DATASET}/in.jsonl", tmp_path / "out.jsonl", model=fake()).resumed == COUNT


def test_a_run_that_was_stopped_goes_on(hub: Hub) -> None:
    output = f"{DATASET}/out.jsonl"
    with pytest.raises(RunInterrupted):
        run(f"{DATASET}/in.jsonl", output, model=fake(slots=1, on_step=stop))
    before = dict(hub.files)
    report = run(f"{DATASET}/in.jsonl", output, model=fake())
    assert 0 < report.resumed < COUNT
    assert report.succeeded == COUNT
    assert all(hub.files[path] == content for path, content in before.items() if not path.endswith(MANIFEST))
    parts = {path: content for path, content in hub.files.items() if path.startswith("out.jsonl/part-")}
    ids = [msgspec.json.decode(line)["custom_id"] for content in parts.values() for line in content.splitlines()]
    assert sorted(ids) == sorted(f"q{n}" for n in range(COUNT))
    assert f"out.jsonl/{MANIFEST}" in hub.files
    assert {each.name for each in read_results(output)} == {f"q{n}" for n in range(COUNT)}


def test_a_table_in_parts(hub: Hub) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    run(f"{DATASET}/in.jsonl", f"{DATASET}/out.parquet/", model=fake())
    parts = [content for path, content in hub.files.items() if path.startswith("out.parquet/part-")]
    rows = [row for part in parts for row in pq.read_table(io.BytesIO(part)).to_pylist()]
    assert {row["custom_id"] for row in rows} == {f"q{n}" for n in range(COUNT)}


def test_a_hub_that_is_busy_now_and_then(hub: Hub) -> None:
    hub.faults = 0.05
    report = run(f"{DATASET}/in.jsonl", f"{DATASET}/out.jsonl", model=fake())
    assert report.succeeded == COUNT


def test_what_is_missing_is_said(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        run(f"{DATASET}/other.jsonl", tmp_path / "out.jsonl", model=fake())
    hub.token = "hf_another"
    with pytest.raises(InputError, match="HF_TOKEN"):
        run(f"{DATASET}/in.jsonl", tmp_path / "out.jsonl", model=fake())
