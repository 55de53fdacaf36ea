"""Step costs in the cache folder: found by whoever computes the same, and ignored when they are broken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from batchwright import kept_costs
from batchwright.engine_config import EngineConfig
from batchwright.errors import ModelNotFound
from batchwright.kept_costs import EngineFacts, find_costs, keep_costs, read_costs, write_costs
from batchwright.models import DEFAULT_MODEL
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepRecord

FACTS = EngineFacts(device="cpu", block_bytes=1000, free_bytes=10**9, max_model_len=2048)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def record(steps: int = 100) -> StepRecord:
    found = StepRecord()
    for number in range(steps):
        rows = 1 + number % 50
        found.add(StepShape(0, 0, rows, 100 * rows, rows), 0.01 + 1e-3 * rows)
    return found


def test_what_one_run_keeps_the_next_one_finds_and_refines() -> None:
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is None
    keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    kept = keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record(50))
    found = find_costs(DEFAULT_MODEL, EngineConfig())
    assert found == kept
    assert found is not None
    assert found.steps == found.costs.steps == 150
    assert found.facts == FACTS
    assert found.costs.seconds(StepShape(0, 0, 10, 1000, 10)) == pytest.approx(0.02, rel=0.02)


def test_what_fewer_threads_took_is_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("steps", {"steps": -5}),
        ("block_bytes", {"facts": replace(FACTS, block_bytes=0)}),
        ("max_model_len", {"facts": replace(FACTS, max_model_len=0)}),
        ("free_bytes", {"facts": replace(FACTS, free_bytes=-1)}),
        ("measurements", {"measurements": ((0, 0, 10**30, 1, 1, 0.1),) * 40}),
        ("measurements", {"measurements": ((0, 0, 0, 0, 0, 1e-300),) * 40}),
    ],
)
def test_a_file_with_numbers_that_cannot_be_is_refused(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    kept = keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    assert kept is not None
    write_costs(tmp_path / "costs.json", replace(kept, weights=(), **change))
    with pytest.raises(ValueError, match=name):
        read_costs(tmp_path / "costs.json")


def test_how_often_each_kind_of_step_came_is_kept() -> None:
    for _ in range(3):
        keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record(2000))
    found = find_costs(DEFAULT_MODEL, EngineConfig())
    assert found is not None
    assert len(found.measurements) == len(found.weights) < 200
    assert sum(found.weights) == pytest.approx(6000)
    assert sum(each.weight for each in found.record.measurements) == pytest.approx(6000)
    without = replace(found, weights=())
    assert {each.weight for each in without.record.measurements} == {1.0}


def test_costs_are_of_one_way_to_compute_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    assert find_costs(DEFAULT_MODEL, EngineConfig(max_num_seqs=8, kv_memory="1MiB")) is not None
    assert find_costs(DEFAULT_MODEL, EngineConfig(quantization="int8")) is None
    monkeypatch.setattr(kept_costs, "machine", lambda: "another")
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is None


def test_too_few_steps_are_not_kept(cache: Path) -> None:
    assert keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record(3)) is None
    assert not list(cache.rglob("*.json"))


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff", b'{"schema": 99}', b"[1]"], ids=["empty", "object", "bytes", "schema", "list"]
)
def test_a_broken_file_counts_as_none_and_is_replaced(
    cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    [path] = cache.rglob("*.json")
    path.write_bytes(content)
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is None
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is None
    assert caplog.text.count("ignored") == 1
    assert keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record()) is not None
    assert caplog.text.count("ignored") == 1
    assert find_costs(DEFAULT_MODEL, EngineConfig()) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", 2),
        ("measurements", []),
        ("measurements", [[1, 1, 1, 1, 1, -1.0]] * 40),
        ("weights", [1.0]),
        ("weights", [0.0] * 72),
    ],
)
def test_a_foreign_file_is_refused_with_the_reason(tmp_path: Path, name: str, value: object) -> None:
    kept = keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    assert kept is not None
    path = tmp_path / "costs.json"
    write_costs(path, kept)
    assert read_costs(path) == kept
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=r"costs\.json"):
        read_costs(path)


def test_a_cache_that_cannot_be_written_stops_nothing(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "costs").write_text("a file, not a folder")
    assert keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record()) is None
    assert keep_costs("/nowhere/at/all", EngineConfig(), FACTS, record()) is None
    assert "not kept" in caplog.text
    with pytest.raises(ModelNotFound):
        find_costs("/nowhere/at/all", EngineConfig())


def test_files_are_few(cache: Path) -> None:
    folder = cache / "costs"
    folder.mkdir()
    for number in range(80):
        (folder / f"{number:02}.json").write_text("{}")
        os.utime(folder / f"{number:02}.json", (number, number))
    keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record())
    left = sorted(path.name for path in folder.iterdir())
    assert len(left) == 64
    assert "16.json" not in left
    assert "79.json" in left
