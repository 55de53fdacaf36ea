"""What a plan says of a job's time: from step costs that are kept, and no model."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from tests.jobs.test_earlier_answers import answers

from batchwright import run
from batchwright.cli.plan_views import show_plan
from batchwright.engine.tokenizer import Tokenizer
from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InputError
from batchwright.inference.loading import load_tokenizer
from batchwright.jobs import job_plan
from batchwright.jobs.answer_probe import ProbedAnswer, ProbedAnswers, chosen_lines
from batchwright.jobs.earlier_answers import JobSignature, earlier_answers, keep_answers
from batchwright.jobs.lines import Line
from batchwright.jobs.loading import ModelChoice
from batchwright.jobs.planned_time import SampledLine
from batchwright.jobs.spec import JobSpec
from batchwright.kept_costs import EngineFacts, find_costs, keep_costs
from batchwright.models import DEFAULT_MODEL
from batchwright.request import SamplingParams
from batchwright.scheduling.slo import StepShape
from batchwright.scheduling.step_costs import StepCosts, StepRecord
from batchwright.simulation.requests import SimulatedRequest

pytestmark = pytest.mark.needs_model  # its tokenizer

COSTS = StepCosts((10e-3, 0.3e-3, 4e-7, 0.2e-3, 2e-6, 0.1e-3, 0.1e-3, 0.1e-3))
FACTS = EngineFacts(device="cpu", block_bytes=1024, free_bytes=64 * 2**20, max_model_len=2048)


@pytest.fixture(autouse=True)
def _own_cache(shallow_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in which nothing is known of a model's steps and answers."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in ("models", "native"):
        (folder / name).symlink_to(shallow_cache / name)
    monkeypatch.setenv("BATCHWRIGHT_CACHE", str(folder))


@pytest.fixture(scope="module")
def loaded() -> dict[tuple[str, EngineConfig], Tokenizer]:
    """Tokenizers that a test has loaded, by their model and its configuration."""
    return {}


@pytest.fixture(autouse=True)
def _each_tokenizer_once(loaded: dict[tuple[str, EngineConfig], Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, config: EngineConfig) -> Tokenizer:
        if (model, config) not in loaded:
            loaded[model, config] = load_tokenizer(model, config)
        return loaded[model, config]

    monkeypatch.setattr("batchwright.jobs.loading.load_tokenizer", load)


def measured(pace: float = 1.0) -> None:
    record = StepRecord()
    for number in range(200):
        prompt, rows = 100 * (number % 3), 1 + number % 60
        shape = StepShape(prompt, prompt * (50 + number), rows, 100 * rows, rows)
        record.add(shape, pace * COSTS.seconds(shape))
    keep_costs(DEFAULT_MODEL, EngineConfig(), FACTS, record)


def source(tmp_path: Path, count: int = 300, **more: object) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": f"Tell me about the number {number}.", "max_tokens": 50} | more for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def signature(path: Path, content: str | None = None) -> JobSignature:
    """What is known of a job by, with the content of `path` or other `content`."""
    spec = JobSpec(inputs=(str(path),), output="-", model=DEFAULT_MODEL)
    return JobSignature.of(spec, [content or hashlib.sha256(path.read_bytes()).hexdigest()])


def told(path: Path) -> tuple[float, float, float, str]:
    time = run(path, None, dry_run=True).planned_time
    assert time is not None
    return time.seconds, *time.between, time.lengths_from


def test_a_machine_that_measured_nothing_says_so(tmp_path: Path) -> None:
    report = run(source(tmp_path), None, dry_run=True)
    assert report.planned_time is None
    assert report.no_planned_time.startswith("this machine keeps no measurements of this model")
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    assert "How long it takes is not known: this machine keeps no measurements of this model" in stream.getvalue()


def test_lines_that_tell_their_lengths_leave_the_error_of_the_cost_model_only(tmp_path: Path) -> None:
    measured()
    seconds, least, most, known_from = told(source(tmp_path, ignore_eos=True))
    # 300 lines of 50 tokens on 64 places: about 5 rounds of 50 steps.
    assert 5 * 50 * 0.025 < seconds < 5 * 50 * 0.06
    assert known_from == "lines"
    assert 0.75 * seconds < least < seconds < most < 1.3 * seconds
    shorter, *_ = told(source(tmp_path, expected_tokens=25))
    assert 0.45 * seconds < shorter < 0.65 * seconds


def test_paces_of_earlier_runs_make_the_interval(tmp_path: Path) -> None:
    for _ in range(12):
        measured()
    steady, least, most, _ = told(source(tmp_path, ignore_eos=True))
    assert most - least < 0.02 * steady
    for number in range(12):
        measured(1.3 if number % 2 else 1.0)
    seconds, least, most, _ = told(source(tmp_path, ignore_eos=True))
    assert most - least > 0.2 * seconds


def test_earlier_answers_tell_how_long_others_are(tmp_path: Path) -> None:
    measured()
    path = source(tmp_path)
    at_most, least, most, known_from = told(path)
    assert known_from == "limits"
    assert least < 0.4 * at_most
    assert most < 1.3 * at_most
    keep_answers(DEFAULT_MODEL, signature(path), answers({10: 30}))
    seconds, least, most, known_from = told(path)
    assert known_from == "same job"
    path.write_text(path.read_text().replace("Tell me", "Write"))
    assert told(path)[3] == "earlier runs", "the file has other lines now"
    path = source(tmp_path)
    assert 0.1 * at_most < seconds < 0.5 * at_most
    assert 0.6 * seconds < least < seconds < most < 1.5 * seconds
    report = run(path, None, dry_run=True)
    assert report.planned_answers is not None
    assert report.planned_answers.expected == pytest.approx(300 * 10, rel=0.1)
    assert report.shared_prompts is not None
    assert report.shared_prompts.cache_tokens == FACTS.sizes(EngineConfig()).num_blocks * 16


def test_answers_that_ignore_their_end_say_nothing_of_others(tmp_path: Path, shallow_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": f"The number {number} is", "max_tokens": 3} for number in range(32)]
    lines = [line | ({"ignore_eos": True} if number % 2 else {}) for number, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = EngineConfig(max_num_seqs=32, kv_memory="64MiB")
    assert run(path, tmp_path / "out.jsonl", model=str(shallow_path), engine=engine).succeeded == 32
    assert [len(each) for each in earlier_answers(str(shallow_path))] == [16]
    common = {"model": str(shallow_path), "engine": engine, "defaults": {"ignore_eos": True}}
    run(path, tmp_path / "again.jsonl", **common)  # type: ignore[arg-type]
    assert [len(each) for each in earlier_answers(str(shallow_path))] == [16], "none of them could end by itself"


def test_the_time_grows_with_the_job_and_is_said(tmp_path: Path) -> None:
    measured()
    few, many = (told(source(tmp_path, count, ignore_eos=True))[0] for count in (640, 6400))
    assert many == pytest.approx(10 * few, rel=0.1)
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), run(tmp_path / "in.jsonl", None, dry_run=True))
    assert "It takes about " in stream.getvalue()
    assert "with answers as long as the lines say" in stream.getvalue()


def test_a_plan_says_what_the_kv_cache_holds_with_shared_prefixes_held_once(tmp_path: Path) -> None:
    measured()
    path, stream = source(tmp_path, 40, ignore_eos=True), io.StringIO()
    show_plan(Console(file=stream, width=300), report := run(path, None, dry_run=True))
    assert report.planned_time is not None
    assert report.planned_answers is not None
    about, most = report.planned_time.kv_tokens, report.planned_answers.kv_tokens
    assert about is not None
    assert most is not None
    assert 40 * 50 < about <= most + 40 * 16
    text = f"take about {min(about, most):,} tokens of the KV cache at a time, at most {most:,} if nothing were shared"
    assert text in stream.getvalue()


def test_lines_that_no_engine_takes_have_no_time(tmp_path: Path) -> None:
    measured()
    path = source(tmp_path, 40, max_tokens=5000)
    report = run(path, None, dry_run=True)
    assert (report.failed, report.planned_time) == (0, None)
    assert report.no_planned_time == "none of the lines fits into the engine"
    path.write_text(path.read_text() + json.dumps({"prompt": "One more", "max_tokens": 5, "ignore_eos": True}) + "\n")
    report = run(path, None, dry_run=True)
    assert report.planned_time is not None
    assert report.planned_time.seconds > 0.0


def test_lines_of_other_kinds_and_no_lines_have_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured()
    path = tmp_path / "in.jsonl"
    path.write_text("")
    assert run(path, None, dry_run=True).planned_time is None
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "text"}}
    path.write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(ModelChoice, "text_tokenizer", lambda _: None)
    report = run(path, None, embedding_model="all-minilm-l6-v2", dry_run=True)
    assert (report.failed, report.planned_time) == (0, None)
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    assert "How long it takes is not known: some lines are for a model that does not generate" in stream.getvalue()


def test_a_plan_for_replicas_says_that_it_has_no_time(tmp_path: Path) -> None:
    measured()
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), run(source(tmp_path, 40), None, replicas=2, dry_run=True))
    assert "How long it takes is not known: it is predicted for one engine in this process" in stream.getvalue()
    assert run(source(tmp_path, 40), None, dry_run=True).no_planned_time == ""


class ProbedEngine:
    """An engine that is loaded for probes, and computes nothing."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_model_is_probed_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = source(tmp_path, ignore_eos=True)
    engines: list[ProbedEngine] = []

    def load(*_: object) -> ProbedEngine:
        engines.append(ProbedEngine())
        return engines[-1]

    def probed(engine: object, progress: object) -> object:
        assert engine is engines[-1]
        measured()
        return find_costs(DEFAULT_MODEL, EngineConfig())

    monkeypatch.setattr(job_plan, "load_engine", load)
    monkeypatch.setattr(job_plan, "measure_costs", probed)
    assert run(path, None, dry_run=True).planned_time is None
    assert run(path, None, dry_run=True, probe=True).planned_time is not None
    assert run(path, None, dry_run=True, probe=True).planned_time is not None
    assert [each.is_closed for each in engines] == [True], "one, the first time"
    with pytest.raises(InputError, match="dry run"):
        run(path, tmp_path / "out.jsonl", probe=True)


def test_a_model_that_cannot_be_probed_costs_the_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of [memory].")

    monkeypatch.setattr(job_plan, "load_engine", fails)
    report = run(source(tmp_path), None, dry_run=True, probe=True)
    assert (report.total, report.planned_time) == (300, None)
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), report)
    assert "How long it takes is not known: out of [memory].\n" in stream.getvalue()


def as_probed(tokens: int, seconds: float) -> Callable[..., ProbedAnswers]:
    """In place of `_Probes.answers`: each line that is chosen has an answer of so many tokens."""

    def answers(probes: object, lines: Sequence[SampledLine], defaults: object) -> ProbedAnswers:
        return ProbedAnswers(
            [ProbedAnswer(each, tokens, has_ended=True) for each in chosen_lines(lines)], seconds, True
        )

    return answers


def test_some_lines_are_answered_where_nothing_is_known_of_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured()
    path = source(tmp_path, temperature=0.0)
    at_most = told(path)[0]
    monkeypatch.setattr(job_plan._Probes, "answers", as_probed(10, 0.0))
    # What other jobs of the model say is less than what its own lines do, and runs of such a job say more.
    keep_answers(DEFAULT_MODEL, signature(path, "other lines"), answers({30: 30}))
    time = run(path, None, dry_run=True, probe=True).planned_time
    assert time is not None
    assert (time.lengths_from, time.runs) == ("probe", 32)
    assert 0.1 * at_most < time.seconds < 0.4 * at_most
    stream = io.StringIO()
    show_plan(Console(file=stream, width=300), run(path, None, dry_run=True, probe=True))
    assert "with answers like those to 32 lines of it" in stream.getvalue()
    keep_answers(DEFAULT_MODEL, signature(path), answers({10: 30}))
    assert told(path)[3] == "same job"
    again = run(path, None, dry_run=True, probe=True).planned_time
    assert again is not None
    assert again.lengths_from == "same job"


def test_the_time_is_as_much_longer_as_the_probe_took_longer_than_its_steps_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured()
    path, seconds = source(tmp_path), []
    for took in (5.0, 10.0):
        monkeypatch.setattr(job_plan._Probes, "answers", as_probed(10, took))
        time = run(path, None, dry_run=True, probe=True).planned_time
        assert time is not None
        seconds.append(time.seconds)
    assert seconds[1] == pytest.approx(2.0 * seconds[0], rel=0.15)


def test_lines_that_cannot_be_answered_leave_what_else_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise EngineClosed("the device failed")

    measured()
    path = source(tmp_path)
    monkeypatch.setattr(job_plan._Probes, "answers", fails)
    time = run(path, None, dry_run=True, probe=True).planned_time
    assert time is not None
    assert time.lengths_from == "limits"
    assert "the device failed" in caplog.text


def test_the_real_model_answers_under_the_names_it_is_served_by(tmp_path: Path) -> None:
    path = source(tmp_path, 6, max_tokens=4, model="gpt-4o")
    choice = ModelChoice(model=DEFAULT_MODEL, served_model_names=("gpt-4o",))
    lines = [
        SampledLine(line, [SimulatedRequest(prompt_tokens=8, output_tokens=4)])
        for line in (Line(number, None, "/v1/completions", json.loads(text)) for number, text in enumerate(path.open()))
    ]
    with job_plan._Probes(DEFAULT_MODEL, choice, lambda text: None) as probes:
        probed = probes.answers(lines, SamplingParams(temperature=0.0))
    assert len(probed.answers) == 6
    assert probed.are_repeatable


def test_a_plan_counts_texts_to_embed_as_the_run_does(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    bodies = [{"input": ["A river.", "Zürich lies on the Limmat"]}, {"input": "word " * 600}, {"input": [101, 102]}]
    bodies += [{"input": "word " * 600, "truncate_prompt_tokens": -1}]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    planned = run(path, None, embedding_model="minilm", dry_run=True)
    made = run(path, tmp_path / "out.jsonl", embedding_model="minilm")
    assert (planned.prompt_tokens, planned.prompt_tokens_estimated) == (made.prompt_tokens, False)
    assert planned.failures == made.failures
    assert planned.failed == 1


def test_lines_that_no_chosen_model_answers_are_found(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [failure] = run(path, None, dry_run=True).failures
    assert (failure.code, failure.lines) == ("unsupported_url", [1])
    assert "--embedding-model" in failure.message
    assert not run(path, None, embedding_model="minilm", dry_run=True).failures
    [failure] = run(path, None, model="minilm", dry_run=True).failures
    assert failure.lines == [2]
