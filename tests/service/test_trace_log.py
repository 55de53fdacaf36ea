"""The log of requests: lengths and times of what was answered, whole lines, and nothing of the texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchwright.clock import ManualClock
from batchwright.errors import InputError
from batchwright.inference.inference import Call
from batchwright.request import Traffic
from batchwright.service.observability.measured import MeasuredInference
from batchwright.service.observability.trace_log import TraceLog
from batchwright.service.observability.traces import Tracing
from batchwright.simulation.traces import read_trace
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL

USAGE = {"prompt_tokens": 40, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 16}}


class Answering:
    """Answers after two seconds with the usage that it is told."""

    models: Sequence[str] = ("m",)
    endpoints: Collection[str] = (CHAT_URL, COMPLETION_URL)
    wants = room = 1

    def __init__(self, clock: ManualClock, usage: dict[str, Any]) -> None:
        self.clock, self.usage = clock, usage

    async def answer(self, call: Call) -> dict[str, Any]:
        self.clock.advance(2.0)
        return {"usage": self.usage}

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        self.clock.advance(2.0)
        yield {"choices": [{"index": 0, "text": "secret"}]}
        yield {"choices": [], "usage": self.usage}

    async def close(self) -> None:
        """Nothing to close."""


def call(body: dict[str, Any] | None = None, *, traffic: Traffic = "online") -> Call:
    return Call(COMPLETION_URL, {"prompt": "secret", **(body or {})}, "req_1", traffic)


def logged(path: Path, usage: dict[str, Any], *calls: Call, streams: bool = False) -> list[dict[str, Any]]:
    """The lines after these calls, which begin at the time 1000."""

    async def run() -> None:
        clock = ManualClock()
        log = TraceLog(path, lambda: 1000.0 + clock.now())
        inference = MeasuredInference(Answering(clock, usage), clock, Tracing(None), trace_log=log)  # type: ignore[arg-type]
        for each in calls:
            if streams:
                async for _ in inference.stream(each):
                    pass
            else:
                await inference.answer(each)
        log.close()

    asyncio.run(run())
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("streams", [False, True])
def test_a_line_for_each_answer(tmp_path: Path, streams: bool) -> None:
    path = tmp_path / "log"
    lines = logged(path, USAGE, call(), call(traffic="batch"), streams=streams)
    assert lines[0] == {"at": 1000.0, "class": "online", "prompt_tokens": 40, "cached_tokens": 16, "output_tokens": 12}
    assert (lines[1]["at"], lines[1]["class"]) == (1002.0, "batch")
    assert "secret" not in path.read_text()
    first, second = read_trace(path.read_text().splitlines(), "log")
    assert (first.prompt_tokens, first.output_tokens, second.arrived_at) == (40, 12, 2.0)


def test_several_answers_have_their_part_each(tmp_path: Path) -> None:
    lines = logged(tmp_path / "log", USAGE, call({"prompt": ["a", "b"], "n": 2}))
    assert [(each["prompt_tokens"], each["cached_tokens"], each["output_tokens"]) for each in lines] == [(20, 8, 3)] * 4


def test_what_has_no_answer_is_not_logged(tmp_path: Path) -> None:
    assert logged(tmp_path / "log", {"prompt_tokens": 5, "total_tokens": 5}, call()) == []
    assert logged(tmp_path / "log", {"prompt_tokens": 5, "completion_tokens": 0}, call()) == []


def test_lines_are_added_after_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logged(path, USAGE, call())
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    for _ in range(2):
        log = TraceLog(path, lambda: 1005.0)
        log.record(call(), 1.0, 7, 0, 3)
        log.close()
    assert path.read_text().startswith(whole + whole[:20] + "\n{")
    assert [each.prompt_tokens for each in read_trace(path.read_text().splitlines(), "log")] == [40, 7, 7]


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        "batchwright.service.observability.trace_log.logger.warning", lambda event, **more: told.append(event)
    )
    log = TraceLog(Path("/dev/full"))
    for _ in range(3):
        log.record(call(), 1.0, 7, 0, 3)
    log.close()
    assert told == ["trace_log_not_written"]
    with pytest.raises(InputError, match="trace_log"):
        TraceLog(tmp_path / "no" / "folder")
