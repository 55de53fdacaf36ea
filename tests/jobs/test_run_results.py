"""`run` from input to output: the forms of result lines, error lines, order, templates, the report."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.errors import InputBroken, InputError, RunFailed
from batchwright.inference.inference import Call
from batchwright.jobs.job_run import RunProgress
from batchwright.jobs.run import run
from batchwright.jobs.sink import Sink
from batchwright.request import SamplingParams

from .fakes import by_id, fake, read, text_of

MESSAGES = [{"role": "user", "content": "Hello"}]


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_chat_line(tmp_path: Path) -> None:
    body = {"messages": MESSAGES, "n": 2, "logprobs": True, "top_logprobs": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    run(jsonl(tmp_path / "in.jsonl", line), tmp_path / "out.jsonl", model=fake())
    (result,) = read(tmp_path / "out.jsonl")
    assert list(result) == ["id", "custom_id", "response", "error"]
    assert result["custom_id"] == "a"
    assert result["error"] is None
    assert result["id"].startswith("batch_req_")
    assert result["id"].endswith("_1")
    assert result["response"]["status_code"] == 200
    assert result["response"]["request_id"]
    completion = result["response"]["body"]
    assert completion["object"] == "chat.completion"
    assert completion["model"] == "fake-model"
    assert isinstance(completion["created"], int)
    assert completion["usage"] == {
        "prompt_tokens": len(str(MESSAGES)),
        "completion_tokens": 6,
        "total_tokens": len(str(MESSAGES)) + 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [choice["index"] for choice in completion["choices"]] == [0, 1]
    choice = completion["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"].startswith("answer ")
    assert choice["finish_reason"] == "stop"
    an = {"token": "an", "logprob": -0.5, "bytes": [97, 110]}
    assert choice["logprobs"]["content"][0] == {**an, "top_logprobs": [an]}


def test_completion_line_with_several_prompts(tmp_path: Path) -> None:
    run(
        jsonl(tmp_path / "in.jsonl", {"prompt": ["a", "b", "c"], "n": 2, "logprobs": 2}),
        tmp_path / "out.jsonl",
        model=fake(slots=1),
    )
    (result,) = read(tmp_path / "out.jsonl")
    completion = result["response"]["body"]
    assert completion["object"] == "text_completion"
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2, 3, 4, 5]
    assert len({choice["text"] for choice in completion["choices"]}) == 6
    assert completion["usage"]["completion_tokens"] == 18
    assert completion["choices"][0]["logprobs"] == {
        "tokens": ["an", "swer"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"an": -0.5, "�": -9999.0}] * 2,
        "text_offset": [0, 2],
    }


def test_bad_lines_become_error_lines_and_the_rest_goes_on(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt": "fine"},
        "{not json",
        "",
        {"id": "a", "prompt": "again"},
        {"id": "b", "prompt": "x" * 6000},
        {"id": "c", "prompt": "poison"},
        {"id": "d", "prompt": "x", "temperature": -1},
        {"id": "e", "prompt": ["fine", "poison", "x" * 6000]},
        {"prompt": "z" * 9000},
        {"prompt": "last"},
    ]
    engine = fake()
    report = run(jsonl(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl", model=engine, max_line_bytes=8000)
    results = by_id(tmp_path / "out.jsonl")
    found = {
        name: (line["error"]["code"], line["error"]["line"], line["error"]["param"])
        for name, line in results.items()
        if line["response"] is None
    }
    assert found == {
        "line-2": ("invalid_json_line", 2, None),
        "line-4": ("duplicate_custom_id", 4, "custom_id"),
        "b": ("context_length_exceeded", 5, "prompt"),
        "c": ("non_finite_logits", 6, None),
        "d": ("invalid_request", 7, "temperature"),
        "e": ("context_length_exceeded", 8, "prompt"),
        "line-9": ("line_too_long", 9, None),
    }
    assert {name for name, line in results.items() if line["error"] is None} == {"a", "line-10"}
    assert "already used on line 1" in results["line-4"]["error"]["message"]
    assert (report.total, report.succeeded, report.failed, report.resumed) == (9, 2, 7, 0)
    assert engine.unfinished == 0


def test_defaults_are_overridden_by_lines(tmp_path: Path) -> None:
    engine = fake()
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "temperature": 1, "priority": 1})
    run(source, tmp_path / "out.jsonl", model=engine, defaults=SamplingParams(max_tokens=9, temperature=0))
    submitted = sorted((r.max_tokens, r.temperature, r.priority) for r in engine.submitted)
    assert submitted == [(9, 0, 5), (9, 1, 1)]


def test_plain_text(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"one\n\n{two}\r\n\xff\nthree")
    engine = fake()
    report = run(tmp_path / "in.txt", tmp_path / "out.jsonl", model=engine)
    assert sorted(engine.prompts) == ["one", "three", "{two}"]
    results = by_id(tmp_path / "out.jsonl")
    assert results.keys() == {"line-1", "line-3", "line-4", "line-5"}
    assert results["line-4"]["error"]["code"] == "invalid_encoding"
    assert report.failed == 1


def test_ordered(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} if i % 7 else "bad" for i in range(60)))
    run(source, tmp_path / "any.jsonl", model=fake())
    assert [line["id"][-2:] for line in read(tmp_path / "any.jsonl")] != sorted(
        line["id"][-2:] for line in read(tmp_path / "any.jsonl")
    )
    report = run(source, tmp_path / "out.jsonl", model=fake(), ordered=True)
    assert [line["custom_id"] for line in read(tmp_path / "out.jsonl")] == [f"line-{i}" for i in range(1, 61)]
    assert (report.succeeded, report.failed) == (51, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "any.jsonl", "any.jsonl.batchwright.json", "in.jsonl", "out.jsonl", "out.jsonl.batchwright.json",
    ]  # fmt: skip


def test_requests_are_kept_in_flight_and_lines_are_not_hoarded(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(100)))
    engine = fake(slots=8)
    run(source, tmp_path / "out.jsonl", model=engine)
    assert engine.peak == 16


def test_bad_lines_do_not_hold_up_what_is_running(tmp_path: Path) -> None:
    # "p0" takes more than one step; the bad lines after it must not all be read before its next one.
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "p0"}, *["bad"] * 5000, {"prompt": "last"})
    failed_at_step: list[int] = []

    def look(number: int) -> None:
        failed_at_step.append(len((tmp_path / "out.jsonl").read_bytes().splitlines()))

    run(source, tmp_path / "out.jsonl", model=fake(on_step=look))
    assert failed_at_step[0] < 1000


def test_report_and_progress(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(10)), "bad")
    seen: list[RunProgress] = []
    report = run(source, tmp_path / "out.jsonl", model=fake(), report=tmp_path / "r.json", progress=seen.append)
    assert [*dict.fromkeys(progress.phase for progress in seen)] == ["reading", "running", "finishing"]
    assert (seen[-1].total, seen[-1].done, seen[-1].failed, seen[-1].running) == (11, 11, 1, 0)
    assert seen[-1].generated_tokens == 30
    assert json.loads((tmp_path / "r.json").read_text()) == report.to_dict()
    assert report.generated_tokens == 30
    assert report.peak_memory_bytes > 0
    assert {"wall_seconds", "ttft_ms", "prefix_hit_rate", "outside_model_seconds"} <= report.to_dict().keys()


def test_an_empty_input_gives_an_empty_output(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    report = run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model="no such model")
    assert (report.total, (tmp_path / "out.jsonl").read_bytes()) == (0, b"")


def test_an_input_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(10)))

    def change(number: int) -> None:
        if number == 1:
            with source.open("a") as file:
                file.write('{"prompt": "new"}\n')

    with pytest.raises(InputBroken, match="changed"):
        run(source, tmp_path / "out.jsonl", model=fake(on_step=change), planned=False)


def test_an_executor_that_is_given_is_not_closed(tmp_path: Path) -> None:
    engine = fake()
    run(jsonl(tmp_path / "in.jsonl", {"prompt": "a"}), tmp_path / "out.jsonl", model=engine)
    assert not engine.closed
    assert text_of(read(tmp_path / "out.jsonl")[0]).startswith("answer ")


class Answering:
    """An inference whose answer to a prompt is what `answers` returns or raises for it."""

    models = ("m",)
    wants = 2

    def __init__(self, answers: Callable[[str], None] = lambda prompt: None) -> None:
        self.answers = answers

    async def answer(self, call: Call) -> dict[str, Any]:
        self.answers(call.body["prompt"])
        await asyncio.sleep(0)
        return {"choices": []}

    def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    async def close(self) -> None:
        raise AssertionError("it is not closed by a run")


def test_nothing_is_written_after_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(9)))
    output, write = tmp_path / "out.jsonl", Sink.write

    def half(sink: Sink, line: bytes) -> None:
        if output.read_bytes().count(b"\n") != 3:
            return write(sink, line)
        write(sink, line[: len(line) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Sink, "write", half)
    with pytest.raises(OSError, match="No space"):
        run(source, output, inference=Answering())
    whole, end = output.read_bytes().rsplit(b"\n", 1)
    assert (whole.count(b"\n"), end[:6]) == (2, b'{"id":')
    monkeypatch.setattr(Sink, "write", write)
    assert run(source, output, inference=Answering()).resumed == 3
    assert len(by_id(output)) == 9


def test_a_line_that_the_inference_cancels_ends_the_run(tmp_path: Path) -> None:
    def cancel(prompt: str) -> None:
        if prompt == "p2":
            raise asyncio.CancelledError

    source = jsonl(tmp_path / "in.jsonl", *({"prompt": f"p{i}"} for i in range(5)))
    with pytest.raises(RunFailed, match="line 3 was cancelled"):
        run(source, tmp_path / "out.jsonl", inference=Answering(cancel))
    assert run(source, tmp_path / "out.jsonl", inference=Answering()).succeeded == 5


def test_what_computes_is_named_once(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", {"prompt": "a", "model": "other"})
    for options, told in (
        ({"inference": Answering(), "model": "m"}, "model='m' has no effect beside an inference"),
        ({"inference": Answering(), "backend": "http://x/v1"}, "backend='http://x/v1' has no effect"),
        ({"model": fake(), "embedding_model": "minilm"}, "embedding_model='minilm' has no effect beside an Engine"),
        ({"model": fake(), "max_num_seqs": 3}, "max_num_seqs=3 has no effect"),
    ):
        with pytest.raises(InputError, match=told):
            run(source, tmp_path / "out.jsonl", **options)
    assert run(source, tmp_path / "out.jsonl", inference=Answering(), served_model_names=["other"]).succeeded == 1


def test_progress_counts_the_tokens_of_this_run(tmp_path: Path) -> None:
    engine, seen = fake(), list[RunProgress]()
    for name in ("a", "b"):
        source = jsonl(tmp_path / f"{name}.jsonl", {"prompt": name})
        run(source, tmp_path / f"{name}.out.jsonl", model=engine, progress=seen.append)
    assert seen[-1].generated_tokens == 3
