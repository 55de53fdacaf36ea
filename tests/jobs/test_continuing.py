"""Going on with an output: failed lines tried again, lines appended to the input, parameters that were mistyped."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import EndpointError, InputError, InvalidRequest, ResumeRefused, RunFailed
from batchwright.inference.inference import Call
from batchwright.jobs import loading, loop
from batchwright.jobs.job_run import RunInterrupted, RunProgress
from batchwright.jobs.run import run
from batchwright.lines.line_retries import RetryPolicy
from batchwright.request import SamplingParams

from .fakes import by_id, codes, fake
from .test_run_results import Answering, jsonl


class Faulty(Answering):
    """An inference that raises the error in `faults` for a prompt, and otherwise repeats it."""

    def __init__(self, faults: dict[str, Exception]) -> None:
        super().__init__()
        self.faults = faults
        self.asked: list[str] = []

    async def answer(self, call: Call) -> dict[str, Any]:
        prompt = call.body["prompt"]
        self.asked.append(prompt)
        if prompt in self.faults:
            raise self.faults[prompt]
        return {"choices": [{"index": 0, "text": prompt, "finish_reason": "stop"}]}


NEVER = InvalidRequest("no such thing", code="bad")
TIMEOUT = TimeoutError("too slow")


def test_a_run_ends_when_all_lines_fail_for_long_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{index}", "id": f"p{index}"} for index in range(300)))
    policy = RetryPolicy(first_delay=0.0, longest_delay=0.0, longest=0.2, most_in_vain=5)
    monkeypatch.setattr(loop, "RetryPolicy", lambda: policy)
    down = EndpointError("http://x/v1 answered 500: oops", status=500)
    with pytest.raises(RunFailed, match=r"no line was answered for .*answered 500: oops.*run the same command again"):
        run(source, tmp_path / "out.jsonl", inference=Faulty({f"p{index}": down for index in range(300)}))
    left = len(by_id(tmp_path / "out.jsonl"))
    assert left < 300
    again = Faulty({})
    assert run(source, tmp_path / "out.jsonl", inference=again).done == 300
    assert len(again.asked) == 300 - left


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.jsonl.gz"])
def test_failed_lines_are_tried_again(tmp_path: Path, name: str) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{index}", "id": f"p{index}"} for index in range(8)))
    output = tmp_path / name
    first = Faulty({"p1": TIMEOUT, "p2": NEVER, "p5": TIMEOUT})
    report = run(source, output, inference=first)
    assert codes(report) == {"request_timeout": 2, "bad": 1}
    assert {each.code: each.retryable for each in report.failures} == {"request_timeout": 2, "bad": 0}
    again = Faulty({"p5": TIMEOUT})
    report = run(source, output, inference=again)
    assert (again.asked, report.failed, codes(report)) == ([], 3, {"request_timeout": 2, "bad": 1})
    report = run(source, output, inference=again, retry_failed=True)
    assert sorted(again.asked) == ["p1", "p5"]
    assert (report.succeeded, report.failed, report.resumed) == (6, 2, 6)
    assert run(source, output, inference=Faulty({}), retry_failed="all").failed == 0
    if name == "out.jsonl":
        results = by_id(output)
        assert {key: line["response"]["body"]["choices"][0]["text"] for key, line in results.items()} == {
            f"p{index}": f"p{index}" for index in range(8)
        }
        assert results["p2"]["error"] is None


def test_a_retry_that_is_interrupted_loses_nothing(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{index}"} for index in range(8)))
    run(source, tmp_path / "out.jsonl", inference=Faulty({f"p{index}": TIMEOUT for index in (1, 2, 3)}))
    with pytest.raises(ZeroDivisionError):
        run(source, tmp_path / "out.jsonl", inference=Faulty({}), retry_failed=True, progress=_fails_when_running)
    report = run(source, tmp_path / "out.jsonl", inference=Faulty({}))
    assert (report.succeeded, report.failed) == (8, 0)


def _fails_when_running(progress: RunProgress) -> None:
    if progress.phase == "running":
        raise ZeroDivisionError


def test_lines_appended_to_the_input_are_the_new_work(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    run(source, tmp_path / "out.jsonl", model=fake())
    with source.open("a") as file:
        file.write('{"prompt": "c"}\n{"prompt": "d"}')
    engine = fake()
    report = run(source, tmp_path / "out.jsonl", model=engine)
    assert (sorted(engine.prompts), report.resumed, report.total) == (["c", "d"], 2, 4)
    assert by_id(tmp_path / "out.jsonl").keys() == {"line-1", "line-2", "line-3", "line-4"}
    # The last line has no end yet: what is appended to it changes it.
    with source.open("a") as file:
        file.write("x\n")
    with pytest.raises(ResumeRefused, match="content of the input"):
        run(source, tmp_path / "out.jsonl", model=fake())
    source.write_text(source.read_text().replace('"a"', '"z"'))
    with pytest.raises(ResumeRefused, match="content of the input"):
        run(source, tmp_path / "out.jsonl", model=fake())


def test_a_run_in_which_nothing_succeeded_may_be_run_otherwise(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "x" * 6000}, {"prompt": "y" * 6000})
    assert run(source, tmp_path / "out.jsonl", model=fake()).failed == 2
    assert run(source, tmp_path / "out.jsonl", model=fake(), defaults=SamplingParams(seed=1)).resumed == 0
    source.write_text('{"prompt": "fine"}\n')
    assert run(source, tmp_path / "out.jsonl", model=fake(), defaults=SamplingParams(seed=1)).succeeded == 1
    with pytest.raises(ResumeRefused, match="seed"):
        run(source, tmp_path / "out.jsonl", model=fake())


def test_the_first_failure_is_told_at_once(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a"}, "bad", {"prompt": "b"}, "worse")
    seen: list[RunProgress] = []
    run(source, tmp_path / "out.jsonl", model=fake(slots=1), progress=seen.append)
    told = {progress.first_failure.line for progress in seen if progress.first_failure is not None}
    assert told == {2}


def test_no_model_is_loaded_for_lines_that_all_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: object, **_: object) -> Any:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(loading, "load_models", load)
    source = jsonl(tmp_path / "in.jsonl", "bad", {"prompt": "a", "temperature": 9}, {"prompt": "a", "max_token": 1}, {})
    report = run(source, tmp_path / "out.jsonl")
    assert report.failed == 4
    assert {*codes(report)} == {
        "invalid_json_line", "invalid_request", "unknown_parameter", "missing_required_parameter",
    }  # fmt: skip


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "in.jsonl", {"prompt": "abc"}, {"prompt": "de", "n": 0}, "bad", {"prompt": "f", "id": "k"}
    )
    engine = fake()
    engine.core.tokenizer.decode = lambda tokens: "".join(map(chr, tokens))
    report = run(source, tmp_path / "out.jsonl", model=engine, dry_run=True, report=tmp_path / "r.json")
    assert (report.total, report.failed, report.prompt_tokens) == (4, 2, 4)
    assert [(each.line, each.custom_id, each.text) for each in report.first_requests] == [
        (1, "line-1", "abc"), (4, "k", "f"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "r.json").read_text())["first_requests"][0]["body"] == {"prompt": "abc"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "r.json"]
    assert engine.submitted == []
    far = run(source, model=None, backend="http://127.0.0.1:9/v1", dry_run=True)
    assert (far.total, far.prompt_tokens, far.first_requests[0].text) == (4, 2, None)
    with pytest.raises(InputError, match="no output"):
        run(source, model=fake())


def test_an_error_that_passes_is_marked(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a", "id": "a"}, "bad")
    busy = Faulty({"a": TIMEOUT})
    run(source, tmp_path / "out.jsonl", inference=busy)
    results = by_id(tmp_path / "out.jsonl")
    assert (results["a"]["error"]["retryable"], results["line-2"]["error"]["retryable"]) == (True, False)


def interrupting(steps: set[int]) -> Any:
    """A fake engine in whose steps of these numbers the user presses Ctrl-C."""

    def press(step: int) -> None:
        if step in steps:
            signal.raise_signal(signal.SIGINT)

    return fake(on_step=press)


def test_lines_under_way_end_after_an_interrupt(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{index}"} for index in range(100)))
    engine = interrupting({3})
    seen: list[RunProgress] = []
    with pytest.raises(RunInterrupted) as interrupted:
        run(source, tmp_path / "out.jsonl", model=engine, progress=seen.append)
    report = interrupted.value.report
    assert report.succeeded == len(engine.submitted) < 100
    assert (report.interrupted, engine.unfinished) == (True, 0)
    assert "stopping" in {progress.phase for progress in seen}
    assert run(source, tmp_path / "out.jsonl", model=fake()).resumed == report.succeeded


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{index}"} for index in range(100)))
    engine = interrupting({3, 4})
    with pytest.raises(RunInterrupted) as interrupted:
        run(source, tmp_path / "out.jsonl", model=engine)
    assert interrupted.value.report.succeeded < len(engine.submitted)
    assert run(source, tmp_path / "out.jsonl", model=fake()).succeeded == 100


def test_the_rate_after_an_interrupt_counts_unfinished_lines(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{index}"} for index in range(100)))
    engine = interrupting({3, 4})
    engine.stats.generated_tokens = 50
    with pytest.raises(RunInterrupted) as interrupted:
        run(source, tmp_path / "out.jsonl", model=engine)
    report = interrupted.value.report
    assert report.generated_tokens_per_second * report.loop_seconds == pytest.approx(engine.stats.generated_tokens - 50)


@pytest.mark.parametrize(
    ("keywords", "error", "says"),
    [
        ({"temperature": 1}, TypeError, "defaults={'temperature'"),
        ({"max_tokns": 1}, TypeError, "defaults={'max_tokens'"),
        ({"max_num_seq": 1}, TypeError, "did you mean max_num_seqs?"),
        ({"defaults": 5}, InvalidRequest, "defaults=5: must be SamplingParams"),
        ({"defaults": {"temprature": 1}}, InvalidRequest, "defaults have no 'temprature'"),
    ],
)
def test_keywords_that_are_none_say_what_was_meant(
    tmp_path: Path, keywords: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=re.escape(says)):
        run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **keywords)
