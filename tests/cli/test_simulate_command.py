"""`batchwright simulate` on small traces, with step costs from a file: no model is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.engine.support import TINY, tiny_model
from typer.testing import CliRunner

from batchwright import kept_costs
from batchwright.cli.main import app
from batchwright.errors import InputError, MissingExtra, UnsupportedModel
from batchwright.jobs.earlier_answers import JobSignature, keep_answers
from batchwright.jobs.spec import JobSpec
from batchwright.kept_costs import EngineFacts, KeptCosts, read_costs, write_costs
from batchwright.lines.forecast import AnswerTally
from batchwright.models import fingerprint
from batchwright.models.cache import cache_dir
from batchwright.request import SamplingParams
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepCosts

EMBEDDING = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a text"}}
COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in which there is nothing but compiled kernels."""
    compiled = cache_dir() / "native"
    compiled.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(compiled)
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    measurements = []
    for number in range(60):
        prompt, rows = 100 * (number % 3), 1 + number
        shape = StepShape(prompt, prompt * (50 + number), rows, 100 * rows, rows)
        measurements.append((prompt, shape.prefill_pairs, rows, shape.decode_keys, rows, COSTS.seconds(shape)))
    facts = EngineFacts(device="cpu", block_bytes=1024, free_bytes=64 * 2**20, max_model_len=4096)
    path = tmp_path / "costs.json"
    write_costs(path, KeptCosts(1, {"machine": "a machine"}, facts, 60, tuple(measurements)))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 300 * number, "input_length": 600, "output_length": 20, "hash_ids": [number % 3, 100 + number]}
        for number in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def told(*arguments: str | Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_a_trace_for_several_numbers_of_replicas(trace: Path, costs: Path) -> None:
    goals = ("--ttft-ms", "500", "--tpot-ms", "50")
    one, four = told("--trace", trace, "--costs", costs, "--replicas", "1,4", *goals, "--price-per-hour", "2")
    assert (one["replicas"], four["replicas"]) == (1, 4)
    assert one["online_requests"] == four["online_requests"] == 40
    assert 0.0 <= one["slo_attainment"] <= four["slo_attainment"] <= 1.0
    assert one["ttft_ms"]["p50"] >= four["ttft_ms"]["p50"] > 0.0
    assert one["cached_tokens"] == 37 * 512
    assert (one["cost_per_hour"], four["cost_per_hour"]) == (2.0, 8.0)
    assert one["job_seconds"] is None


def test_what_is_refused_of_a_trace_is_said_with_the_reason(tmp_path: Path, costs: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = [(5000, 20), (100, 5), (6000, 9), (3000, 9)]
    rows = [{"at": at, "prompt_tokens": prompt, "output_tokens": out} for at, (prompt, out) in enumerate(lengths)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Of 1,024 bytes a block of 16 tokens: 2,048 tokens.
    options = ("--trace", trace, "--costs", costs, "--replicas", "1,2", "--kv-memory", "128KiB")
    for found in told(*options):
        told_of = [(each["reason"], each["requests"]) for each in found["refusals"]]
        assert (found["refused"], told_of) == (3, [("context", 2), ("kv_cache", 1)])
    result = CliRunner().invoke(app, ["simulate", *map(str, options)], catch_exceptions=False)
    said = [line for line in result.stderr.splitlines() if line.startswith("requests: ")]
    assert said[0] == (
        "requests: 2 refused, longer than the context of the model (the first: 5,000 prompt tokens and 20 of the "
        "answer exceed the 4,096 of the model)"
    )
    assert said[1].startswith("requests: 1 refused, longer than the KV cache (3000 prompt tokens and max_tokens=9 need")
    assert len(said) == 2


def test_a_rate_stretches_the_trace(trace: Path, costs: Path) -> None:
    slow, fast = (told("--trace", trace, "--costs", costs, "--rate", rate)[0] for rate in ("1", "20"))
    assert slow["seconds"] == pytest.approx(39.0, abs=2.0)
    assert fast["ttft_ms"]["p99"] > slow["ttft_ms"]["p99"]
    [first] = told("--trace", trace, "--costs", costs, "--requests", "5")
    assert first["online_requests"] == 5
    random, again = (told("--trace", trace, "--costs", costs, "--rate", "2", "--poisson") for _ in range(2))
    assert random == again
    assert random != told("--trace", trace, "--costs", costs, "--rate", "2", "--poisson", "--seed", "1")


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path: Path, costs: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", "utf-8-sig")
    assert told("--trace", path, "--costs", costs)[0]["prompt_tokens"] == 374


def test_a_trace_that_is_no_text_is_refused_whole(tmp_path: Path, costs: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:15:46,3,4\n" * 1000 + b"\xff")
    with pytest.raises(InputError, match="cannot be read"):
        told("--trace", path, "--costs", costs)


def test_drawn_requests_beside_a_job_of_known_lengths(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    usage = {"prompt_tokens": 200, "completion_tokens": 30}
    results = [{"custom_id": f"{n}", "response": {"body": {"usage": usage}}, "error": None} for n in range(30)]
    failed = {"custom_id": "x", "response": None, "error": {"message": "no"}}
    lengths = {"prompt_tokens": 100, "output_tokens": 10}
    job.write_text("".join(json.dumps(each) + "\n" for each in [*results, failed, lengths]))
    drawn = ("--poisson", "--rate", "2", "--requests", "20", "--prompt-tokens", "50", "--output-tokens", "10")
    [found] = told(*drawn, "--job", job, "--costs", costs)
    assert (found["online_requests"], found["job_lines"]) == (20, 31)
    assert 0.0 < found["job_seconds"] <= found["seconds"]
    [alone] = told("--job", job, "--costs", costs)
    assert alone["online_requests"] == 0
    assert alone["slo_attainment"] is None
    assert alone["output_tokens"] == 30 * 30 + 10


@pytest.mark.parametrize("names", [("prompt_tokens", "completion_tokens"), ("input_tokens", "output_tokens")])
def test_results_state_their_lengths_whatever_the_endpoint(tmp_path: Path, costs: Path, names: tuple[str, str]) -> None:
    job = tmp_path / "results.jsonl"
    body = {"usage": dict(zip(names, (160, 403), strict=True)), "choices": [{}] * 4}
    results = [{"custom_id": f"{n}", "response": {"body": body}, "error": None} for n in range(5)]
    job.write_text("".join(json.dumps(each) + "\n" for each in results))
    [found] = told("--job", job, "--costs", costs)
    assert (found["job_lines"], found["prompt_tokens"], found["output_tokens"]) == (20, 20 * 160, 5 * 403)
    # The answers to a line have its prompt in common, of which the last token is computed for each.
    assert found["cached_tokens"] == 5 * 3 * 144


@pytest.mark.parametrize(("cached", "said"), [(160, "counts as one prefix that all share"), (0, "are not known; give")])
def test_what_a_run_found_in_its_cache_is_found_again(tmp_path: Path, costs: Path, cached: int, said: str) -> None:
    job = tmp_path / "results.jsonl"
    usage = {"prompt_tokens": 200, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}}
    results = [{"custom_id": f"{n}", "response": {"body": {"usage": usage}}, "error": None} for n in range(5)]
    job.write_text("".join(json.dumps(each) + "\n" for each in results))
    [found] = told("--job", job, "--costs", costs)
    assert found["cached_tokens"] == 4 * cached
    result = CliRunner().invoke(app, ["simulate", "--job", str(job), "--costs", str(costs)], catch_exceptions=False)
    assert re.search(f"job lines: 5 are results, which have lengths and no text: .*{said}", result.stderr)


def test_results_that_are_copies_or_make_no_sense_are_left_out(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "results.jsonl"
    usages: list[dict[str, Any]] = [
        {"prompt_tokens": 50, "completion_tokens": 7},
        {"prompt_tokens": 50, "completion_tokens": 7, "deduplicated": True},
        {"prompt_tokens": 10**11, "completion_tokens": 7},
        {"prompt_tokens": "50", "completion_tokens": 7},
    ]
    results = [
        {"custom_id": f"{n}", "response": {"body": {"usage": u, "choices": [{}] * 2}}, "error": None}
        for n, u in enumerate(usages)
    ]
    job.write_text("".join(json.dumps(each) + "\n" for each in results))
    [found] = told("--job", job, "--costs", costs)
    assert (found["job_lines"], found["output_tokens"]) == (2, 7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.jsonl", '{"prompt_tokens": 3, "output_tokens": 3}\n{"prompt_tokens": "x", "output_tokens": 3}\n'),
        ("job.csv", "prompt_tokens,output_tokens\n3,3\n12.5,3\n"),
        ("job.csv", f"prompt_tokens,output_tokens\n3,3\n{'9' * 5000},3\n"),
    ],
)
def test_lengths_that_are_none_are_named_with_their_line(tmp_path: Path, costs: Path, name: str, text: str) -> None:
    job = tmp_path / name
    job.write_text(text)
    with pytest.raises(InputError, match=rf"{name}, line [23]: prompt_tokens="):
        told("--job", job, "--costs", costs)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer whose tokens are words."""

    class Words:
        @staticmethod
        def encode(prompt: Any) -> list[int]:
            text = prompt if isinstance(prompt, str) else prompt[0]["content"]
            return list(range(len(text.split())))

    monkeypatch.setattr("batchwright.inference.loading.load_tokenizer", lambda *_: Words())


@pytest.mark.parametrize(
    ("name", "text", "lines", "tokens"),
    [
        ("job.txt", "Write a poem\nA word\n", 2, 5),
        ("job.csv", "prompt,other\nWrite a poem,1\nA word,2\n", 2, 5),
        ("job.tsv", "other\tprompt\n1\tA word\n", 1, 2),
        ("job.csv", "prompt_tokens,output_tokens\n70,5\n30,2\n", 2, 100),
        ("job.jsonl", '{"prompt": "Write a poem"}\n{"prompt": broken\n7\n{"prompt": "A word"}\n', 2, 5),
        ("job.json", '[{"prompt": "Write a poem"}, 7]', 1, 3),
    ],
)
@pytest.mark.usefixtures("words")
def test_a_job_is_any_input_of_run(tmp_path: Path, costs: Path, name: str, text: str, lines: int, tokens: int) -> None:
    job = tmp_path / name
    job.write_text(text)
    [found] = told("--job", job, "--costs", costs, "--expected-tokens", "20")
    assert (found["job_lines"], found["prompt_tokens"]) == (lines, tokens)


@pytest.mark.usefixtures("words")
def test_lines_that_are_left_out_are_counted_and_said(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    lines = [
        *[json.dumps(EMBEDDING | {"custom_id": str(n)}) for n in range(30)],
        '{"prompt": broken',
        "7",
        *['{"prompt": "A word", "temperature": 0}'] * 3,
        json.dumps({"prompt": "word " * 5000}),
        json.dumps({"custom_id": "x", "response": None, "error": {"message": "no"}}),
    ]
    job.write_text("\n".join(lines))
    [found] = told("--job", job, "--costs", costs)
    assert (found["job_lines"], found["refused"]) == (1, 0)
    left = {each["reason"]: (each["lines"], each["first_line"]) for each in found["job_left_out"]}
    assert left == {
        "encoder": (30, 1),
        "broken": (2, 31),
        "identical": (2, 34),
        "too_long": (1, 36),
        "no_answer": (1, 37),
    }
    result = CliRunner().invoke(app, ["simulate", "--job", str(job), "--costs", str(costs)], catch_exceptions=False)
    assert "job lines: 30 left out, for models that generate nothing (the first is line 1)" in result.stderr
    assert re.search(r"job lines: 2 left out, broken \(the first is line 31: .*JSON", result.stderr)
    assert re.search(r"job lines: 1 left out, too long for the engine \(line 36: 5,000 prompt tokens", result.stderr)


def test_a_job_without_a_line_to_compute_says_why(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    job.write_text(f"{json.dumps(EMBEDDING)}\n" * 3)
    with pytest.raises(InputError, match=r"no line that can be computed; 3 left out, for models that generate nothing"):
        told("--job", job, "--costs", costs)


@pytest.mark.usefixtures("words")
def test_lines_that_ask_the_same_are_computed_once(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    same, drawn = {"prompt": "A word", "temperature": 0}, {"prompt": "A word", "temperature": 1}
    job.write_text("".join(json.dumps(each) + "\n" for each in [same] * 20 + [drawn] * 3))
    [found] = told("--job", job, "--costs", costs, "--max-tokens", "7")
    assert (found["job_lines"], found["output_tokens"]) == (4, 4 * 7)


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("flags", "lines", "tokens"),
    [
        ((), 5, 5 * 256),
        (("--seed", "3"), 5, 5 * 256),
        (("--temperature", "0"), 3, 256 * 3),
        (("--job-seed", "3", "--max-tokens", "7"), 2, 7 * 2),
        (("--n", "2", "--max-tokens", "7"), 10, 10 * 7),
        (("--ignore-eos", "--max-tokens", "7", "--expected-tokens", "3"), 5, 5 * 7),
    ],
)
def test_the_parameters_of_a_job_are_those_of_its_run(
    tmp_path: Path, costs: Path, flags: tuple[str, ...], lines: int, tokens: int
) -> None:
    job = tmp_path / "job.jsonl"
    asked = [{"prompt": "A word"}] * 3 + [{"prompt": "A word", "temperature": 0.5}] * 2
    job.write_text("".join(json.dumps(each) + "\n" for each in asked))
    [found] = told("--job", job, "--costs", costs, *flags)
    assert (found["job_lines"], found["output_tokens"]) == (lines, tokens)


def test_parameters_of_a_job_need_one(trace: Path, costs: Path) -> None:
    with pytest.raises(InputError, match="--temperature, --n: sampling is that of the lines of a --job"):
        told("--trace", trace, "--costs", costs, "--temperature", "0", "--n", "2")
    with pytest.raises(InputError, match="--max-tokens, --job-seed: sampling is that of"):
        told("--trace", trace, "--costs", costs, "--job-seed", "3", "--max-tokens", "2")
    for temperature in ("-1", "2.5"):
        options = ["simulate", "--job", "job.jsonl", "--costs", str(costs), "--temperature", temperature]
        assert CliRunner().invoke(app, options).exit_code == 2


@pytest.mark.usefixtures("words")
def test_answers_are_as_long_as_those_of_earlier_runs(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    stated = [{"prompt": "Two words", "expected_tokens": 50}, {"prompt_tokens": 9, "output_tokens": 40}]
    lines = [*[{"prompt": f"Word {number}"} for number in range(20)], *stated]
    job.write_text("".join(json.dumps(each) + "\n" for each in lines))

    def simulated(*flags: str) -> tuple[str, int, str]:
        options = ("--job", str(job), "--costs", str(costs), *flags)
        [found] = told(*options)
        text = CliRunner().invoke(app, ["simulate", *options], catch_exceptions=False).stderr
        [note] = [line for line in text.splitlines() if line.startswith("job lines: answers")]
        return found["job_lengths_from"], found["output_tokens"] - 90, note

    source, tokens, note = simulated()
    assert (source, tokens) == ("limits", 20 * 256)
    assert "are as long as lines allow" in note
    assert "give --expected-tokens" in note
    greedy = SamplingParams(temperature=0.0)
    spec = JobSpec(inputs=(str(job),), output="-", model="smollm2-135m", defaults=greedy)
    content = hashlib.sha256(job.read_bytes()).hexdigest()
    tally = AnswerTally()
    for _ in range(20):
        tally.count({"usage": {"completion_tokens": 30}, "choices": [{"finish_reason": "stop"}]}, 256)
    keep_answers("smollm2-135m", JobSignature.of(spec, [content]), tally)
    assert simulated("--temperature", "0")[:2] == ("same job", 20 * 30)
    source, tokens, note = simulated()
    assert (source, tokens) == ("earlier runs", 20 * 30)
    assert "are as in 1 earlier run of the model, where the file does not say" in note
    assert simulated("--expected-tokens", "7")[:2] == ("expected_tokens", 20 * 7)
    # Costs of another model tell which one is meant, and these are not its answers.
    write_costs(costs, msgspec.structs.replace(read_costs(costs), identity={"model": "0" * 64}))
    assert simulated()[0] == "limits"


@pytest.mark.usefixtures("words")
def test_the_format_of_a_job_is_told_and_one_for_all_files(tmp_path: Path, costs: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\nWrite a poem\n")
    (tmp_path / "b.data").write_text('{"prompt": "A word"}\n')
    [found] = told("--job", tmp_path / "b.data", "--input-format", "jsonl", "--costs", costs)
    assert (found["job_lines"], found["prompt_tokens"]) == (1, 2)
    (tmp_path / "b.data").rename(tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="give files of one format"):
        told("--job", tmp_path / "[ab].*", "--costs", costs)
    with pytest.raises(InputError, match=r"- is a stream, .*: save it to a file first"):
        told("--job", "-", "--costs", costs)


@pytest.mark.usefixtures("words")
def test_a_table_without_prompts_is_refused(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.csv"
    job.write_text("text\nWrite a poem\n")
    with pytest.raises(InputError, match="column 'prompt'"):
        told("--job", job, "--costs", costs)


@pytest.mark.usefixtures("words")
def test_the_prompts_of_a_job_are_counted(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    lines = [{"prompt": "word " * 64}, {"messages": [{"role": "user", "content": "two words"}], "max_tokens": 7}, {}]
    job.write_text("".join(json.dumps(each) + "\n" for each in lines))
    [found] = told("--job", job, "--costs", costs, "--expected-tokens", "20")
    assert (found["job_lines"], found["prompt_tokens"], found["output_tokens"]) == (2, 66, 27)
    [most] = told("--job", job, "--costs", costs)
    assert most["output_tokens"] == 256 + 7
    job.write_text("{}\n")
    with pytest.raises(InputError, match="no line"):
        told("--job", job, "--costs", costs)


def test_the_table_says_what_it_is_judged_by(trace: Path, costs: Path) -> None:
    arguments = ["simulate", "--trace", str(trace), "--costs", str(costs), "--replicas", "1,2", "--ttft-ms", "500"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    lines = {re.split(r"\s{2,}", line)[0]: line for line in result.stdout.splitlines()}
    assert "SLO met (TTFT ≤ 500 ms)" in lines
    assert lines["online requests"].split()[-2:] == ["40", "40"]
    assert "job done after" not in lines
    assert "cost per hour" not in lines
    assert "60 steps measured on a machine" in result.stderr


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_how_far_a_simulation_is(
    terminal: bool, trace: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "[job].jsonl"
    job.write_text('{"prompt_tokens": 100, "output_tokens": 9}\n' * 9)
    shown = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    monkeypatch.setattr("rich.console.Console", lambda *_, **options: shown if options else Console())
    monkeypatch.setattr("batchwright.cli.simulate._STATUS_SECONDS", 0.0)
    told("--trace", trace, "--job", job, "--costs", costs, "--replicas", "1,2")
    monkeypatch.undo()
    file = shown.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    assert ("counting the tokens of" in text and "[job].jsonl" in text) is terminal
    assert ("simulating 1 replica" in text and "simulating 2 replicas" in text) is terminal
    assert ("of 49 requests" in text) is terminal


def test_long_times_and_sums_of_money_are_those_of_other_commands(tmp_path: Path, costs: Path) -> None:
    job = tmp_path / "job.jsonl"
    job.write_text('{"prompt_tokens": 1000, "output_tokens": 2000}\n' * 300)
    arguments = ["simulate", "--job", str(job), "--costs", str(costs), "--price-per-hour", "12345.6"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    cells = {re.split(r"\s{2,}", line)[0]: line.split()[-1] for line in result.stdout.splitlines()}
    assert cells["cost per hour"] == "$12,345.60"
    assert re.fullmatch(r"\d+:\d\d", cells["job done after"])


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_plots(trace: Path, costs: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / f"plot{suffix}"
    told("--trace", trace, "--costs", costs, "--replicas", "1,2", "--ttft-ms", "500", "--plot", path)
    content = path.read_text()
    assert content.startswith("<svg" if suffix == ".svg" else "<!doctype html>")
    assert "SLO met" in content
    told("--trace", trace, "--costs", costs, "--plot", path)
    assert "SLO met" not in path.read_text()
    assert "busy" in path.read_text()


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No costs are found or measured."""
    monkeypatch.setattr("batchwright.cli.simulate._measured_costs", lambda *_: pytest.fail("costs are asked for"))


@pytest.mark.usefixtures("unmeasured")
def test_a_plot_that_cannot_be_drawn_is_refused_before_costs_are_measured(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    for path in (tmp_path / "none" / "plot.svg", folder):
        with pytest.raises(InputError, match=re.escape(f"--plot {path}: must be a file in a folder")):
            told("--trace", trace, "--plot", path)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtra, match=r"vl_convert; install it: pip install 'batchwright\[report\]'"):
        told("--trace", trace, "--plot", tmp_path / "plot.svg")


@pytest.mark.parametrize("link", [None, Path.hardlink_to, Path.symlink_to])
@pytest.mark.parametrize("flag", ["--trace", "--job", "--costs"])
def test_what_is_read_is_not_written(
    flag: str, link: Callable[[Path, Path], None] | None, trace: Path, costs: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job.jsonl"
    job.write_text('{"prompt_tokens": 100, "output_tokens": 9}\n')
    read = {"--trace": trace, "--job": job, "--costs": costs}
    options = [part for pair in read.items() for part in pair]
    before = read[flag].read_bytes()
    written = read[flag]
    if link is not None:
        written = tmp_path / "other.svg"
        link(written, read[flag])
    for output in ("--save-costs", *(("--plot",) if link is not None else ())):
        with pytest.raises(InputError, match=rf"{output} {written} is the file of {flag}: name another file"):
            told(*options, output, written)
    assert read[flag].read_bytes() == before


def test_a_job_of_several_files_is_not_written(costs: Path, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt_tokens": 100, "output_tokens": 9}\n')
    with pytest.raises(InputError, match=r"--save-costs .*b\.jsonl is the file of --job"):
        told("--job", tmp_path / "[ab].jsonl", "--costs", costs, "--save-costs", tmp_path / "b.jsonl")


def test_a_schema_is_not_written(costs: Path, tmp_path: Path) -> None:
    schema, job = tmp_path / "schema.json", tmp_path / "job.jsonl"
    schema.write_text("{}")
    job.write_text('{"prompt_tokens": 100, "output_tokens": 9}\n')
    with pytest.raises(InputError, match=r"--save-costs .*schema\.json is the file of --json-schema"):
        told("--job", job, "--costs", costs, "--json-schema", schema, "--save-costs", schema)


def test_costs_and_a_plot_are_two_files(trace: Path, costs: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.svg"
    with pytest.raises(InputError, match=rf"--plot {both} is the file of --save-costs"):
        told("--trace", trace, "--costs", costs, "--save-costs", both, "--plot", both)
    assert not both.exists()


def test_what_was_simulated_is_told_when_a_plot_cannot_be_written(
    trace: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vl_convert")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("batchwright.cli.simulation_plots.draw", fail)
    arguments = ["simulate", "--trace", str(trace), "--costs", str(costs), "--plot", str(tmp_path / "plot.svg")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, OSError)
    assert "online requests" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "there is no traffic"),
        (("--poisson",), "--poisson needs --rate"),
        (("--poisson", "--rate", "0"), "--rate 0"),
        (("--poisson", "--rate", "nan"), "--rate nan"),
        (("--poisson", "--rate", "1e-300"), "--rate 1e-300"),
        (("--poisson", "--rate", "1", "--prompt-tokens", "inf"), "--prompt-tokens inf: must be"),
        (("--poisson", "--rate", "1", "--output-tokens", "inf"), "--output-tokens inf: must be"),
        (("--poisson", "--rate", "1", "--price-per-hour", "inf"), "--price-per-hour inf: must be"),
        (("--rate", "2", "--job", "prompts.jsonl"), "--rate 2: needs --trace or --poisson"),
        (("--requests", "5", "--job", "prompts.jsonl"), "--requests 5: needs --trace or --poisson"),
        (("--trace", "/nowhere.csv"), "/nowhere.csv cannot be read"),
        (("--poisson", "--rate", "1", "--replicas", "1,x"), "--replicas 1,x"),
        (("--poisson", "--rate", "1", "--replicas", "0"), "--replicas 0"),
        (("--poisson", "--rate", "1", "--replicas", "1,1001"), "--replicas 1,1001: must be numbers from 1 to 1,000"),
        (("--poisson", "--rate", "1", "--save-costs", "no such folder/costs.json"), "--save-costs no such folder"),
        (("--poisson", "--rate", "1", "--plot", "x.png"), "--plot x.png"),
        (("--poisson", "--rate", "1", "--ttft-ms", "-3"), "ttft_ms=-3.0: must be a number above 0; leave it out"),
        (("--poisson", "--rate", "1", "--kv-memory", "1KB"), "kv_memory"),
        (("--poisson", "--rate", "1", "--max-model-len", "5000"), "max_model_len=5000"),
        (("--poisson", "--rate", "1", "--costs", "/nowhere.json"), "/nowhere.json cannot be read"),
        (("--poisson", "--rate", "1", "--costs", __file__), "holds no step costs"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], reason: str, costs: Path) -> None:
    given = arguments if "--costs" in arguments else (*arguments, "--costs", str(costs))
    with pytest.raises(InputError, match=re.escape(reason)):
        CliRunner().invoke(app, ["simulate", *given], catch_exceptions=False)


@pytest.mark.parametrize("flag", ["--prompt-tokens", "--output-tokens"])
def test_a_mean_that_is_no_number_is_refused(flag: str, costs: Path) -> None:
    # Some versions of Typer find it below the least that a flag may be, others do not.
    arguments = ("simulate", "--poisson", "--rate", "1", flag, "nan", "--costs", str(costs))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 or isinstance(result.exception, InputError)


@pytest.mark.usefixtures("words")
def test_a_model_of_embeddings_is_refused(tmp_path: Path, costs: Path) -> None:
    folder = tmp_path / "sentences"
    folder.mkdir()
    (folder / "modules.json").write_text("[]")
    for model in ("minilm", folder):
        for given in (("--costs", costs), ()):
            with pytest.raises(UnsupportedModel, match="makes embeddings, not text"):
                told("--poisson", "--rate", "1", "--model", model, *given)


def test_costs_of_another_model_than_the_one_named_are_refused(trace: Path, costs: Path) -> None:
    kept = read_costs(costs)
    options = ("--trace", trace, "--costs", costs)
    for of, is_taken in ((fingerprint("smollm2-135m"), True), ("0" * 64, False), ("org/name", True)):
        write_costs(costs, msgspec.structs.replace(kept, identity={"model": of}))
        told(*options)
        if is_taken:
            told(*options, "--model", "smollm2-135m")
            continue
        with pytest.raises(InputError, match=f"--costs {costs}: was measured of another model than --model smollm2"):
            told(*options, "--model", "smollm2-135m")
    write_costs(costs, msgspec.structs.replace(kept, identity={"model": "org/name"}))
    with pytest.raises(InputError, match="another model than --model org/other"):
        told(*options, "--model", "org/other")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--dtype", "float32"), "with dtype=bfloat16, not with --dtype float32"),
        (("--quantization", "int8"), "with quantization=None, not with --quantization int8"),
        (("--attention", "native"), "with attention=sdpa, not with --attention native"),
        (("--body", "transformers"), "with body=fused, not with --body transformers"),
        (("--device", "cuda"), "with device=cpu, not with --device cuda"),
        (("--deterministic",), "with deterministic=False, not with --deterministic"),
        (("--tensor-parallel", "2"), "with tensor_parallel=1, not with --tensor-parallel 2"),
        (("--dtype", "bfloat16", "--device", "cpu", "--no-deterministic", "--tensor-parallel", "1"), None),
        (("--dtype", "auto", "--max-num-seqs", "8"), None),
        ((), None),
    ],
)
def test_costs_of_another_engine_than_the_flags_name_are_refused(
    trace: Path, costs: Path, flags: tuple[str, ...], said: str | None
) -> None:
    measured = {"dtype": "bfloat16", "quantization": "None", "deterministic": "False", "device": "auto"}
    measured |= {"tensor_parallel": "1", "body": "fused", "attention": "sdpa"}
    write_costs(costs, msgspec.structs.replace(read_costs(costs), identity=measured))
    options: tuple[str | Path, ...] = ("--trace", trace, "--costs", costs, *flags)
    if said is None:
        told(*options)
        return
    with pytest.raises(InputError, match=f"--costs {costs}: was measured {said}: leave the flag out, or measure"):
        told(*options)


def test_what_was_left_to_the_engine_may_be_what_a_flag_names(trace: Path, costs: Path) -> None:
    write_costs(costs, msgspec.structs.replace(read_costs(costs), identity={"dtype": "auto", "attention": "auto"}))
    told("--trace", trace, "--costs", costs, "--dtype", "bfloat16", "--attention", "native")


def test_costs_of_a_deterministic_engine_are_not_those_of_another(trace: Path, costs: Path) -> None:
    write_costs(costs, msgspec.structs.replace(read_costs(costs), identity={"deterministic": "True"}))
    with pytest.raises(InputError, match="with deterministic=True, not with --no-deterministic"):
        told("--trace", trace, "--costs", costs, "--no-deterministic")


def test_a_model_of_which_nothing_is_known_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, saved = tmp_path / "model", tmp_path / "saved.json"
    tiny_model(model, "llama", **TINY)
    monkeypatch.setattr(kept_costs, "_MOST_ERROR", float("inf"))  # however busy this machine is
    traffic = ("--poisson", "--rate", "5", "--requests", "30", "--prompt-tokens", "30", "--output-tokens", "9")
    options = ("--model", model, *traffic, "--device", "cpu", "--kv-memory", "4MiB")
    [found] = told(*options, "--save-costs", saved)
    assert found["online_requests"] == 30
    monkeypatch.setattr(
        "batchwright.inference.loading.load_models", lambda *given, **_: pytest.fail("it is loaded again")
    )
    assert told(*options) == [found]
    assert told(*options, "--costs", saved) == [found]
