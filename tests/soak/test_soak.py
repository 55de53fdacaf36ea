"""A soak of seconds, and what the long one's verdict rests on. The long form: `make soak`."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.endure.probe import Probed
from benchmarks.endure.watch import Sample
from tests.crash.models import CHAT, EMBEDDINGS, Engine, Oracle
from tests.crash.outside import answer_to, usage_of
from tests.soak.checks import checks
from tests.soak.faults import Fault, World, in_order
from tests.soak.logs import read_log
from tests.soak.online import Asked
from tests.soak.report import report
from tests.soak.soak import Plan, Seen, soak
from tests.soak.timeline import ANSWERED, BROKEN, REFUSED, Timeline

_FAULTS = ("SIGKILL", "endpoint answers 500", "hostile clients")
_PLAN = Plan(
    9,
    seed=12,
    period=3,
    fault_seconds=1,
    settling=1,
    lease=2,
    clients=6,
    customers=1,
    watchers=1,
    tenants=2,
    only=_FAULTS,
)
_BY_SPEED = "/health"
"""In the name of the check that says how fast the machine is, too."""


def test_a_short_soak(tmp_path: Path) -> None:
    seen = asyncio.run(soak(_PLAN, tmp_path / "soak"))
    page = report(seen)
    assert all(check.met is not False for check in checks(seen) if _BY_SPEED not in check.name), page
    assert {era.name for era in seen.timeline.eras} == set(_FAULTS)
    assert any(each.outcome == ANSWERED for each in seen.asked), page
    assert all(load.jobs for load in seen.loads), page
    assert seen.messages == sum(len(load.jobs) for load in seen.loads)


def test_in_the_second_half_the_process_stays() -> None:
    async def nothing(world: World) -> None: ...

    faults = [Fault(name, nothing, ends_process=name in "ab") for name in "abcde"]
    order = [fault.name for fault in in_order(faults, 20, random.Random(1))]
    assert sorted(order[:10]) == sorted("abcde" * 2)
    assert sorted(order[10:19]) == sorted("cde" * 3)
    assert len(order) == 20
    assert {fault.name for fault in in_order(faults, 6, random.Random(1))} == set("abcde")
    assert [fault.name for fault in in_order(faults[:1], 4, random.Random(1))] == ["a"] * 4


def test_a_failure_is_explained_by_the_fault_of_its_time_only() -> None:
    timeline = Timeline(settling=10)
    timeline.begin("SIGKILL", {REFUSED}, 100.0)
    assert timeline.explains(REFUSED, 101.0, 102.0)
    timeline.end(103.0)
    with pytest.raises(ValueError, match="SIGKILL has not settled before disk full"):
        timeline.begin("disk full", (), 112.0)
    timeline.begin("disk full", (), 120.0)
    assert timeline.explains(REFUSED, 112.9, 130.0), "it began when the first fault had not settled"
    assert timeline.explains(REFUSED, 90.0, 100.0), "it was under way when the first fault began"
    assert not timeline.explains(REFUSED, 113.1, 130.0)
    assert not timeline.explains(BROKEN, 101.0, 102.0)
    assert timeline.explains(ANSWERED, 50.0, 51.0)
    assert timeline.calm(90.0, 99.0)
    assert not timeline.calm(90.0, 100.0)
    assert timeline.calm(113.1, 119.9)
    assert not timeline.calm(1e6, 1e6), "the second fault has not ended"


def test_answers_that_are_wrong_are_noticed() -> None:
    right = {"choices": [{"message": {"content": answer_to("why")}}], "usage": usage_of("why")}
    Oracle().check(CHAT, "why", right)
    with pytest.raises(AssertionError):
        Oracle().check(CHAT, "who", right)
    with pytest.raises(AssertionError):
        Oracle().check(CHAT, "why", right | {"usage": usage_of("whoever")})
    vector = {"data": [{"embedding": [0.1] * 384}], "usage": {"prompt_tokens": 3}}
    Engine().check(EMBEDDINGS, "why", vector)
    with pytest.raises(AssertionError):
        Engine().check(EMBEDDINGS, "why", vector | {"data": [{"embedding": [float("nan")] * 384}]})


def _seen(tmp_path: Path) -> Seen:
    """A soak in which nothing went wrong."""
    timeline = Timeline(settling=10)
    timeline.begin("SIGKILL", {REFUSED}, 1000.0)
    timeline.end(1005.0)
    (tmp_path / "log").write_text(json.dumps({"event": "request", "level": "info"}) + "\n")
    rest = Sample(0.0, 1.0, 100.0, 20, 8)
    return Seen(
        Plan(3600, seed=1),
        timeline,
        asked=[Asked("chat", 10.0, 11.0, ANSWERED), Asked("chat", 1001.0, 1002.0, REFUSED)],
        samples=[Sample(float(at), 1.0, 100.0 + at / 3600, 20, 8) for at in range(0, 3000, 10)],
        probed=[Probed(float(at), 0.01, answered=True) for at in range(500)],
        requests=2,
        first_rest=rest,
        last_rest=rest,
        log=read_log(tmp_path / "log"),
    )


def _missed(seen: Seen) -> list[str]:
    return [check.name for check in checks(seen) if check.met is False]


def test_each_check_can_fail(tmp_path: Path) -> None:
    seen = _seen(tmp_path)
    assert all(check.met for check in checks(seen))
    worse = {
        "Every batch": replace(seen, failure="AssertionError: lines lost or doubled"),
        "Online requests": replace(seen, asked=[*seen.asked, Asked("chat", 2000.0, 2001.0, "500", "on fire")]),
        "p99": replace(seen, probed=[replace(each, seconds=0.9) for each in seen.probed]),
        "In an hour memory": replace(seen, samples=[replace(each, rss=100 + each.at / 36) for each in seen.samples]),
        "At rest": replace(seen, held={'batchwright_calls_in_flight{traffic="online"}': 1.0}),
        "The log": replace(seen, log=replace(seen.log, size=2**21)),
        "No traceback": replace(seen, log=replace(seen.log, traceback_count=1)),
        "No temporary": replace(seen, temporary=[Path("upload.part")]),
    }
    for name, each in worse.items():
        (missed,) = _missed(each)
        assert missed.startswith(name)
        assert "**Missed.**" in report(each)
    more = [replace(each, descriptors=20 + int(each.at / 10)) for each in seen.samples]
    assert _missed(replace(seen, samples=more))
    assert _missed(replace(seen, last_rest=replace(seen.samples[0], descriptors=400)))
    short = replace(seen, samples=seen.samples[:20])
    assert [check.met for check in checks(short)].count(None) == 1


def test_a_log_is_summed_up(tmp_path: Path) -> None:
    second = {"event": "trying_again", "level": "warning", "timestamp": "2026-08-01T10:00:00.1Z"}
    lines = [
        json.dumps({"event": "request", "level": "info"}),
        *[json.dumps(second)] * 3,
        json.dumps({"event": "request_failed", "level": "error", "exception": [{"exc_type": "KeyError"}]}),
        "working on batches in /data",
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "KeyError: 1",
    ]
    path = tmp_path / "log"
    path.write_text("\n".join(lines) + "\n")
    figures = read_log(path)
    assert (figures.lines, figures.requests, figures.busiest) == (9, 1, 3)
    assert figures.errors == {"request_failed": 1}
    assert figures.traceback_count == 2
    assert "KeyError: 1" in figures.tracebacks[1]
    assert figures.size == path.stat().st_size
