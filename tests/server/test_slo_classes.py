"""Service level objectives: read, chosen by header, key or priority, judged, and reported."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import Service, with_service

from batchwright.errors import DeadlineExceeded, GenerationError, InputError, InvalidRequest, Overloaded
from batchwright.service.observability.slo_classes import SloClass, SloFigures, read_slo_classes, slo_class_of
from batchwright.service.setting_sources import load_settings
from batchwright.store.records import ApiKey

CLASSES = {
    "urgent": SloClass(ttft_ms=200.0, latency_ms=60_000.0, max_priority=2),
    "usual": SloClass(latency_ms=60_000.0, max_priority=5),
    "nightly": SloClass(latency_ms=0.001, keys=("cron",), goal=0.5),
}
CONFIG = """\
[slo.interactive]
ttft_ms = 500
tpot_ms = 50.5
goal = 0.995
max_priority = 3

[slo.bulk]
latency_ms = 60000
keys = ["nightly", "key_1"]
"""
READ = {
    "interactive": SloClass(ttft_ms=500, tpot_ms=50.5, goal=0.995, max_priority=3),
    "bulk": SloClass(latency_ms=60_000, keys=("nightly", "key_1")),
}


def test_classes_are_read_from_the_file_the_environment_and_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(CONFIG)
    assert load_settings(config=path).slo == READ
    text = "interactive: ttft_ms=500 tpot_ms=50.5 goal=0.995 max_priority=3; bulk: latency_ms=6e4 keys=nightly,key_1;"
    assert load_settings({"slo": text}).slo == READ
    monkeypatch.setenv("BATCHWRIGHT_SLO", "bulk: latency_ms=5")
    assert load_settings().slo == {"bulk": SloClass(latency_ms=5.0)}
    assert load_settings({"slo": ""}).slo == {}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {"ttf_ms": 5}}, "a: there is no 'ttf_ms'; the keys are: ttft_ms, tpot_ms"),
        ({"a": {}}, "a: has no target; give one or more of ttft_ms, tpot_ms, latency_ms"),
        ({"a": {"ttft_ms": -1}}, "a.ttft_ms=-1: must be a number of milliseconds above 0"),
        ({"a": {"ttft_ms": True}}, "a.ttft_ms=True: must be a number of milliseconds above 0"),
        ({"a": {"ttft_ms": 1, "goal": 1.5}}, "a.goal=1.5: must be a number above 0 and at most 1"),
        ({"a": {"ttft_ms": 1, "max_priority": 2.5}}, "a.max_priority=2.5: must be a whole number"),
        ({"a": {"ttft_ms": 1, "keys": "x"}}, "a.keys='x': must be a list of names or ids"),
        ({"a b": {"ttft_ms": 1}}, "'a b' cannot be the name of a class"),
        ({"a": 5}, "a: must be a table such as [slo.a] ttft_ms = 500"),
        (5, "must be tables such as"),
        ({str(number): {"ttft_ms": 1} for number in range(21)}, "has 21 classes: at most 20"),
        ({"a": {"ttft_ms": 1, "keys": ["k"]}, "b": {"ttft_ms": 1, "keys": ["k"]}}, "the key 'k' is in several classes"),
        ({name: {"ttft_ms": 1, "max_priority": 1} for name in "ab"}, "max_priority=1 is in several classes"),
        ("a ttft_ms=1", "write each class once, as NAME: KEY=VALUE"),
        ("a: ttft_ms=soon", "a.ttft_ms='soon': must be a number of milliseconds above 0"),
    ],
)
def test_what_is_wrong_with_a_class_is_told(value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        read_slo_classes(value)


def test_a_wrong_class_in_the_file_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[slo.a]\nttft_ms = 0\n")
    with pytest.raises(InputError, match=r"settings\.toml: slo=.*a\.ttft_ms=0: must be a number of milliseconds above"):
        load_settings(config=path)


def _key(name: str) -> ApiKey:
    return ApiKey(id="key_2", name=name, tenant="default", prefix="bw-", created_at=0.0)


@pytest.mark.parametrize(
    ("named", "key", "priority", "chosen"),
    [
        ("nightly", "cron", 0, "nightly"),
        ("urgent", "cron", 9, "urgent"),
        (None, "cron", 0, "nightly"),
        (None, "other", 0, "urgent"),
        (None, None, 2, "urgent"),
        (None, None, 3, "usual"),
        (None, None, None, "usual"),
        (None, None, "bad", "usual"),
        (None, None, 6, None),
    ],
)
def test_the_header_goes_before_the_key_and_the_key_before_the_priority(
    named: str | None, key: str | None, priority: Any, chosen: str | None
) -> None:
    body = {} if priority is None else {"priority": priority}
    assert slo_class_of(CLASSES, named, None if key is None else _key(key), body) == chosen


def test_requests_are_judged_by_the_targets_that_are_known() -> None:
    figures = SloFigures(SloClass(ttft_ms=100.0, latency_ms=1000.0))
    figures.answered({"ttft_ms": 99.0, "latency_ms": 1000.0})
    figures.answered({"latency_ms": 1000.0})
    figures.answered({"ttft_ms": 101.0, "latency_ms": 1001.0})
    figures.failed(InvalidRequest("its own fault"))
    figures.failed(DeadlineExceeded("late"))
    figures.failed(Overloaded("full"))
    figures.failed(GenerationError("broke"))
    assert figures.verdicts == {"met": 2, "missed": 2, "refused": 1, "failed": 1}
    assert figures.misses == {"ttft_ms": 1, "latency_ms": 1}
    assert figures.attained == pytest.approx(2 / 6)
    only_first_tokens = SloFigures(SloClass(ttft_ms=1.0))
    only_first_tokens.answered({"latency_ms": 5.0})
    assert (only_first_tokens.verdicts, only_first_tokens.attained) == ({}, None)


@with_service(slo=CLASSES)
async def test_attainment_is_reported_by_class_and_figures_by_priority(service: Service) -> None:
    async def ask(prompt: str, headers: dict[str, str] | None = None, **body: Any) -> int:
        answer = await service.http.post("/v1/completions", json={"prompt": prompt, **body}, headers=headers)
        return answer.status_code

    assert await ask("a b", priority=1, stream=True, deadline_ms=60_000) == 200
    assert await ask("a b", {"X-SLO-Class": "nightly"}) == 200
    assert await ask("fail", priority=5) == 500
    assert await ask("x", priority=5, max_tokens=-1) == 400
    service.stub.raises = Overloaded("full")
    assert await ask("x", priority=2) == 429
    service.stub.raises = DeadlineExceeded("late")
    assert await ask("x", priority=7, deadline_ms=1) == 408
    service.stub.raises = None
    sync = await service.http.post("/v1/batch/sync", json={"prompts": ["a", "b"], "priority": 4})
    assert sync.status_code == 200
    wrong = await service.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-SLO-Class": "none"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-slo-class")
    assert "the classes are: urgent, usual, nightly" in wrong.json()["error"]["message"]

    state = (await service.http.get("/dashboard/state")).json()
    slos = {each["name"]: each for each in state["slos"]}
    verdicts = {
        name: [each[verdict] for verdict in ("met", "missed", "failed", "refused")] for name, each in slos.items()
    }
    assert verdicts == {"urgent": [1, 0, 0, 1], "usual": [2, 0, 1, 0], "nightly": [0, 1, 0, 0]}
    assert (slos["urgent"]["attained"], slos["nightly"]["goal"], slos["nightly"]["attained"]) == (0.5, 0.5, 0.0)
    levels = {each["priority"]: each for each in state["levels"]}
    assert list(levels) == [1, 2, 4, 5, 7]
    assert {name: [each[what] for what in ("succeeded", "failed", "refused")] for name, each in levels.items()} == {
        1: [1, 0, 0], 2: [0, 0, 1], 4: [2, 0, 0], 5: [1, 2, 0], 7: [0, 0, 0],
    }  # fmt: skip
    assert (levels[1]["in_time_share"], levels[7]["in_time_share"], levels[4]["in_time_share"]) == (1.0, 0.0, None)
    assert levels[4]["p99"] > 0

    text = (await service.http.get("/metrics")).text
    for told in (
        'slo_requests_total{outcome="met",slo="urgent"} 1.0',
        'slo_misses_total{slo="nightly",target="latency"} 1.0',
        'slo_target_seconds{slo="urgent",target="ttft"} 0.2',
        'slo_goal_ratio{slo="nightly"} 0.5',
        'slo_seconds_count{slo="urgent",target="ttft"} 1.0',
        'priority_calls_total{outcome="refused",priority="2",traffic="online"} 1.0',
        'priority_deadlines_total{outcome="late",priority="7",traffic="online"} 1.0',
        'priority_call_seconds_count{priority="4",traffic="online"} 2.0',
    ):
        assert f"batchwright_{told}" in text


@with_service(slo=CLASSES, max_online_sequences=2)
async def test_requests_that_are_not_admitted_count_as_refused(service: Service) -> None:
    async def ask(prompt: str) -> int:
        return (await service.http.post("/v1/completions", json={"prompt": prompt, "priority": 0})).status_code

    waiting = asyncio.create_task(ask("wait"))

    async def it_waits() -> bool:
        return service.stub.waiting == 1

    await service.until(it_waits)
    assert await ask("x") == 429
    service.stub.go.set()
    assert await waiting == 200
    assert service.services.inference.slos["urgent"].verdicts == {"met": 1, "refused": 1}
    assert service.services.inference.figures["online"].levels[0].refused == 1
