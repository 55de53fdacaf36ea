"""Identical lines in the loop of a job, in virtual time: whatever fails or is interrupted, each ends once."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.jobs.fakes import by_id
from tests.long_form import examples

from batchwright.clock import ManualClock
from batchwright.errors import EndpointDown, InvalidRequest
from batchwright.inference.inference import Call, Inference
from batchwright.jobs.identical_lines import IdenticalLines, find_repeats
from batchwright.jobs.job import Job
from batchwright.jobs.line_orders import EndpointOrder
from batchwright.jobs.loop import JobLoop, Tally
from batchwright.jobs.spec import JobSpec
from batchwright.planning.prefix_order import PrefixOrder
from batchwright.testing import play

DEFAULTS = {"temperature": 0}


@dataclass
class Scripted(Inference):
    """Answers after some seconds, `places` at once; each call's seconds and error are the next of `script`."""

    script: list[tuple[int, type[Exception] | None]]
    places: int = 3
    models = ("m",)
    asked: list[str] = field(default_factory=list)
    answered: list[str] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    inside: int = 0

    @property
    def wants(self) -> int:
        return self.places - self.inside

    async def answer(self, call: Call) -> dict[str, Any]:
        prompt = call.body["prompt"]
        self.asked.append(prompt)
        self.asked_at.append(asyncio.get_running_loop().time())
        seconds, error = self.script.pop() if self.script else (1, None)
        self.inside += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.inside -= 1
        if error is not None:
            raise error(f"no {prompt}")
        self.answered.append(prompt)
        choices = [{"index": 0, "text": prompt.upper(), "finish_reason": "stop"}]
        return {"choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def compute(folder: Path, inference: Scripted, *, stop_after: float | None = None) -> Tally:
    """Run the job in `folder`, and interrupt it after so many seconds."""

    async def main(clock: ManualClock) -> Tally:
        spec = JobSpec(
            inputs=(str(folder / "in.jsonl"),),
            output=str(folder / "out.jsonl"),
            model="m",
            backend="http://b",
            defaults=DEFAULTS,
        )
        with Job(spec, clock) as job:
            repeats = find_repeats(job, DEFAULTS, "m")
            with job.begin() as sink, IdenticalLines[Any](repeats, sink, job.earlier_answers()) as identical:
                order = EndpointOrder[Any](PrefixOrder(most_lines=2, least_shared=2, step=1))
                loop = JobLoop(job, inference, sink, clock=clock, defaults=DEFAULTS, order=order, identical=identical)
                running = asyncio.ensure_future(loop.run())
                if stop_after is not None:
                    asyncio.get_running_loop().call_later(stop_after, running.cancel)
                with suppress(asyncio.CancelledError):
                    await running
                return loop.tally

    return play(main)


def write(folder: Path, prompts: list[str]) -> None:
    (folder / "in.jsonl").write_text(
        "".join(json.dumps({"id": str(number), "prompt": prompt}) + "\n" for number, prompt in enumerate(prompts))
    )


def results(folder: Path) -> Mapping[str, str]:
    """By id: the text, or the code of the error."""
    return {
        name: line["error"]["code"] if line["response"] is None else line["response"]["body"]["choices"][0]["text"]
        for name, line in by_id(folder / "out.jsonl").items()
    }


errors = st.sampled_from([None, None, None, InvalidRequest, EndpointDown])


@settings(max_examples=examples(40, long=150))
@given(
    st.lists(st.sampled_from(["aax", "aay", "b", "c", "d", "e", "f", "g"]), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 9), errors), max_size=30),
    st.integers(1, 6),
    st.lists(st.integers(0, 20), max_size=3),
)
def test_each_line_ends_once_and_no_answer_is_asked_twice(
    prompts: list[str], script: list[tuple[int, type[Exception] | None]], places: int, stops: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, prompts)
        inference = Scripted(script, places)
        tallies = [compute(folder, inference, stop_after=stop) for stop in stops] + [compute(folder, inference)]
        ended = results(folder)
    assert len(ended) == len(prompts)
    refused = Counter[str]()
    for number, prompt in enumerate(prompts):
        assert ended[str(number)] in (prompt.upper(), "invalid_request")
        refused[prompt] += ended[str(number)] == "invalid_request"
    for prompt, count in Counter(inference.answered).items():
        # After two errors the lines that waited are asked at the same time.
        assert count == 1 or refused[prompt] >= 2
    shared = sum(tally.deduplicated for tally in tallies)
    assert shared + len(inference.answered) + sum(refused.values()) == len(prompts)
    assert sum(tally.prompt_tokens for tally in tallies) == 3 * len(inference.answered)
    assert sum(tally.saved_prompt_tokens for tally in tallies) == 3 * shared
    assert not inference.inside


@settings(max_examples=examples(20, long=50))
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(1, 3), st.floats(0, 1))
def test_after_a_kill_at_any_byte_no_answer_is_asked_again(prompts: list[str], places: int, share: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, prompts)
        compute(folder, Scripted([], places))
        whole = (folder / "out.jsonl").read_bytes()
        left = whole[: int(share * len(whole))]
        (folder / "out.jsonl").write_bytes(left)
        answered = {
            json.loads(line)["response"]["body"]["choices"][0]["text"].lower()
            for line in left.splitlines(keepends=True)
            if line.endswith(b"\n")
        }
        again = Scripted([], places)
        tally = compute(folder, again)
        assert sorted(again.asked) == sorted({*prompts} - answered)
        assert tally.succeeded == len(prompts) - left.count(b"\n")
        assert dict(results(folder)) == {str(number): prompt.upper() for number, prompt in enumerate(prompts)}


def test_others_do_not_wait_for_a_line_that_was_interrupted(tmp_path: Path) -> None:
    write(tmp_path, ["a", "a", "b"])
    inference = Scripted([(1, None), (100, None)])
    tally = compute(tmp_path, inference, stop_after=2)
    assert (tally.succeeded, dict(results(tmp_path))) == (1, {"2": "B"})
    compute(tmp_path, inference)
    assert dict(results(tmp_path)) == {"0": "A", "1": "A", "2": "B"}
    assert Counter(inference.asked) == {"a": 2, "b": 1}


def test_what_is_under_way_at_an_interrupt_still_answers_all(tmp_path: Path) -> None:
    write(tmp_path, ["a"] * 5)
    tally = compute(tmp_path, Scripted([(3, None)]), stop_after=1)
    assert (tally.succeeded, tally.deduplicated) == (5, 4)


@pytest.mark.parametrize("places", [1, 50])
def test_many_lines_that_wait_are_not_all_read(places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchwright.jobs.identical_lines._MOST_WAITING", 10 * 256)
    write(tmp_path, ["a", "b"] * 40 + ["c"])
    inference = Scripted([(50, None), (20, None)], places)
    tally = compute(tmp_path, inference)
    assert (tally.succeeded, sorted(inference.asked)) == (81, ["a", "b", "c"])
    assert inference.asked_at[2] >= 20
