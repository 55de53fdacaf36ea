"""`run` with the real engine and a real model."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.engine.engine import Engine
from batchwright.errors import ResumeRefused
from batchwright.jobs.job_run import RunInterrupted, RunProgress
from batchwright.jobs.run import run
from batchwright.request import Prompt, SamplingParams

from .fakes import by_id, read, text_of

EXAMPLES = Path(__file__).parents[2] / "examples"
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def engine(shallow_path: Path) -> Iterator[Engine]:
    engine = Engine(shallow_path, dtype="float32", max_num_seqs=4, max_batch_tokens=64)
    yield engine
    engine.close()


def test_the_texts_are_those_of_the_engine(tmp_path: Path, engine: Engine) -> None:
    messages = [{"role": "user", "content": "Name a fruit."}]
    source = tmp_path / "in.jsonl"
    lines = [
        {"id": "text", "prompt": "The capital of France is"},
        {"id": "chat", "messages": messages},
        {"id": "seeded", "prompt": "Once upon a time", "temperature": 1.0, "seed": 5},
        {"id": "long", "prompt": "word " * 20_000},
        {"id": "ids", "prompt": [504, 3575]},
        {"id": "foreign ids", "prompt": [10**9]},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = run(source, tmp_path / "out.jsonl", model=engine, defaults=GREEDY)
    results = by_id(tmp_path / "out.jsonl")
    seeded = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    prompts: list[Prompt] = ["The capital of France is", messages, "Once upon a time", [504, 3575]]
    expected = engine.generate(prompts, [GREEDY, GREEDY, seeded, GREEDY])
    for name, response in zip(["text", "chat", "seeded", "ids"], expected, strict=True):
        assert text_of(results[name]) == response.output
        usage = results[name]["response"]["body"]["usage"]
        assert usage["prompt_tokens"] == response.usage.prompt_tokens
        assert usage["completion_tokens"] == response.usage.completion_tokens
    assert results["chat"]["response"]["body"]["object"] == "chat.completion"
    assert results["long"]["error"]["code"] == "context_length_exceeded"
    assert results["foreign ids"]["error"]["code"] == "invalid_request"
    assert (report.succeeded, report.failed) == (4, 2)


def test_an_engine_can_be_used_again_after_a_stop(tmp_path: Path, engine: Engine) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"Fact number {number}:"}) + "\n" for number in range(6)))

    def stop(progress: RunProgress) -> None:
        if progress.generated_tokens >= 5:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        run(source, tmp_path / "stopped.jsonl", model=engine, defaults=GREEDY, progress=stop)
    assert engine.unfinished == 0
    assert run(source, tmp_path / "out.jsonl", model=engine, defaults=GREEDY).succeeded == 6


def test_the_examples_all_succeed_and_the_report_adds_up(tmp_path: Path, shallow_path: Path) -> None:
    report = run(
        EXAMPLES / "prompts.jsonl",
        tmp_path / "out.jsonl",
        model=str(shallow_path),
        served_model_names=["smollm2-135m"],
        dtype="float32",
    )
    assert (report.total, report.failed) == (24, 0)
    usages = [line["response"]["body"]["usage"] for line in read(tmp_path / "out.jsonl")]
    assert report.generated_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert report.prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert report.steps > 0
    assert 1 < report.occupancy_mean <= report.occupancy_peak <= report.max_num_seqs
    assert 0 < report.kv_blocks_peak <= report.kv_blocks
    assert 0 < report.padding_efficiency <= 1
    assert 0 < report.prefix_hit_rate < 1
    assert 0 <= report.outside_model_seconds < report.loop_seconds < report.wall_seconds
    assert report.decode_tokens_per_second > 0
    assert report.prefill_tokens_per_second > 0
    assert report.ttft_ms["p50"] is not None
    assert report.tpot_ms["p99"] is not None


def test_the_table_example(tmp_path: Path, engine: Engine) -> None:
    template = "Advertise a {product} that {feature}."
    source, output = EXAMPLES / "prompts.csv", tmp_path / "out.csv"
    report = run(source, output, model=engine, defaults=GREEDY, chat=True, prompt_template=template)
    assert report.failed == 0
    with output.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["id"] for row in rows] == ["kettle", "lamp", "tent", "notebook", "bell"]
    assert all(row["answer"] and row["finish_reason"] and not row["error"] for row in rows)


def test_a_model_that_was_replaced_under_its_path_is_another_model(shallow_path: Path, tmp_path: Path) -> None:
    """A run with other weights would mix their answers with those that are there."""
    model = tmp_path / "model"
    shutil.copytree(shallow_path, model)
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("One\nTwo\n")
    params = SamplingParams(max_tokens=1, temperature=0.0)
    run(source, output, model=str(model), defaults=params, kv_memory="20MB")
    assert run(source, output, model=str(model), defaults=params).resumed == 2
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-1000, 2)
        weights.write(bytes(500))
    with pytest.raises(ResumeRefused, match="the files of the model"):
        run(source, output, model=str(model), defaults=params)
