"""Runs whose lines a model here computes in a planned order, and identical ones once."""

from __future__ import annotations

import asyncio
import io
import json
import random
import shutil
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.jobs.fakes import FakeEngine, by_id, codes, encode, killed, read, text_of

from batchwright.cli.plan_views import show_plan
from batchwright.engine_config import EngineConfig
from batchwright.errors import ContextLengthExceeded, InputError, InvalidRequest, ModelNotFound
from batchwright.inference.inference import Inference
from batchwright.jobs import loading, token_counts
from batchwright.jobs.loading import LoadedModels, NoModel
from batchwright.jobs.run import run
from batchwright.models import resolve


def write(path: Path, bodies: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def few_shot(lines: int, prefixes: int) -> list[dict[str, Any]]:
    """Prompts with one of some prefixes of 100 characters, one after the other."""
    return [
        {"id": str(number), "prompt": str(number % prefixes) * 100 + f" question {number}"} for number in range(lines)
    ]


def test_prompts_that_begin_alike_follow_one_another(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", few_shot(60, 6))
    engine = FakeEngine(slots=15)  # so that all lines are known at once
    engine.stats.kv_blocks = 200
    run(source, tmp_path / "out.jsonl", model=engine)  # type: ignore[arg-type]
    firsts = [prompt[0] for prompt in engine.prompts]
    assert sorted(firsts) == sorted(str(number % 6) for number in range(60))
    assert sum(one != other for one, other in pairwise(firsts)) == 5
    arrival = FakeEngine()
    run(source, tmp_path / "other.jsonl", model=arrival, planned=False)  # type: ignore[arg-type]
    assert [prompt[0] for prompt in arrival.prompts] == [str(number % 6) for number in range(60)]
    assert by_id(tmp_path / "out.jsonl").keys() == by_id(tmp_path / "other.jsonl").keys()


def test_the_tokenizer_is_read_while_replicas_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, engine = threading.Event(), FakeEngine(slots=15)
    engine.stats.kv_blocks = 200

    def load_tokenizer(model: str, config: EngineConfig) -> Any:
        reading.set()
        return engine.core.tokenizer

    async def open_replicas(*given: Any, **more: Any) -> Inference:
        assert await asyncio.to_thread(reading.wait, 30)
        return LoadedModels(engine, None).inference()  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(loading, "open_replicas", open_replicas)
    source = write(tmp_path / "in.jsonl", few_shot(60, 6))
    assert run(source, tmp_path / "out.jsonl", model="smollm2-135m", replicas=2).succeeded == 60
    firsts = [prompt[0] for prompt in engine.prompts]
    assert sum(one != other for one, other in pairwise(firsts)) == 5


def test_identical_lines_are_computed_once(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"id": str(number), "prompt": f"prompt {number % 7}", "temperature": 0} for number in range(70)
    ]
    bodies += [{"id": f"drawn {number}", "prompt": "prompt 0", "temperature": 1} for number in range(3)]
    source = write(tmp_path / "in.jsonl", bodies)
    engine = FakeEngine()
    report = run(source, tmp_path / "out.jsonl", model=engine)  # type: ignore[arg-type]
    assert (report.succeeded, report.deduplicated, len(engine.submitted)) == (73, 63, 10)
    lines = by_id(tmp_path / "out.jsonl")
    assert len({text_of(lines[str(number)]) for number in range(0, 70, 7)}) == 1
    each = FakeEngine()
    assert run(source, tmp_path / "each.jsonl", model=each, dedupe=False).deduplicated == 0  # type: ignore[arg-type]
    assert len(each.submitted) == 73


def test_greedy_lines_that_differ_in_how_tokens_are_drawn_are_computed_once(tmp_path: Path) -> None:
    limits = ("max_tokens", "max_completion_tokens")
    bodies: list[dict[str, Any]] = [
        {"id": str(number), "prompt": f"prompt {number % 3}", "temperature": 0, "seed": number, limits[number % 2]: 5}
        for number in range(12)
    ]
    bodies += [{"id": f"drawn {seed}", "prompt": "prompt 0", "temperature": 1, "seed": seed} for seed in range(2)]
    source, engine = write(tmp_path / "in.jsonl", bodies), FakeEngine()
    report = run(source, tmp_path / "out.jsonl", model=engine)  # type: ignore[arg-type]
    assert (report.succeeded, report.deduplicated, len(engine.submitted)) == (14, 9, 5)
    assert run(source, tmp_path / "dry.jsonl", model=FakeEngine(), dry_run=True).deduplicated == 9  # type: ignore[arg-type]
    # A run that was begun when each of them was asked goes on with any of the answers that there are.
    resumed, rest = tmp_path / "resumed.jsonl", FakeEngine()
    run(source, resumed, model=FakeEngine(), dedupe=False, limit=4)  # type: ignore[arg-type]
    report = run(source, resumed, model=rest)  # type: ignore[arg-type]
    assert (report.resumed, report.done, report.deduplicated, len(rest.submitted)) == (4, 14, 8, 2)
    texts = {name: text_of(line) for name, line in by_id(resumed).items()}
    # The fake's answers depend on the seed.
    assert all(texts[str(number)] in (texts[str(number % 3)], texts["3"]) for number in range(4, 12))


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.long), 5, pytest.param(9, marks=pytest.mark.long)])
def test_a_planned_run_goes_on_where_it_was_killed(tmp_path: Path, step: int) -> None:
    drawn = random.Random(step)
    bodies = [
        {"id": str(number), "prompt": str(drawn.randrange(3)) * 60 + str(number % 20), "temperature": 0}
        for number in range(60)
    ]
    bodies.insert(30, {"id": "bad", "prompt": 5})
    source, output = write(tmp_path / "in.jsonl", bodies), tmp_path / "out.jsonl"
    killed(source, output, step)
    before = len(read(output))
    report = run(source, output, model=FakeEngine())  # type: ignore[arg-type]
    assert (report.total, report.done, report.failed) == (61, 61, 1)
    assert report.resumed == before
    assert codes(report) == {"invalid_request": 1}
    run(source, tmp_path / "whole.jsonl", model=FakeEngine(), planned=False, dedupe=False)  # type: ignore[arg-type]
    assert {name: text_of(line) for name, line in by_id(output).items() if line["response"]} == {
        name: text_of(line) for name, line in by_id(tmp_path / "whole.jsonl").items() if line["response"]
    }


def test_a_plan_leaves_to_an_endpoint_what_models_here_do_not_support(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:," + "A" * 999}}]
    image = {"id": "image", "messages": [{"role": "user", "content": parts}]}
    other = {"id": "other", "model": "other", "messages": [{"role": "user", "content": "Hello"}]}
    source = write(tmp_path / "in.jsonl", [image, other, {"id": "empty", "messages": []}])
    options: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "dry_run": True}
    report = run(source, None, defaults={"max_tokens": 10}, **options)
    assert [(each.code, each.lines) for each in report.failures if each.code == "model_not_found"] == [
        ("model_not_found", [2])
    ], "as the run does"
    assert (report.total, report.failed) == (3, 2)
    assert report.prompt_tokens < 10, "without the image"
    assert report.planned_answers is not None
    assert report.planned_answers.at_most == 10
    unbounded = run(source, None, **options)
    assert unbounded.planned_answers is not None
    assert unbounded.planned_answers.at_most is None


def test_a_plan_counts_one_answer_of_a_response_and_all_that_it_may_have(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    body = {"instructions": "Be brief.", "input": messages, "max_output_tokens": 200_000}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    source = write(tmp_path / "in.jsonl", [line])
    report = run(source, None, backend="http://127.0.0.1:9/v1", model="paid", dry_run=True)
    assert report.planned_answers is not None
    assert report.planned_answers.at_most == 200_000


def test_texts_to_encode_do_not_count_as_shared(tmp_path: Path) -> None:
    chats = few_shot(40, 4)
    lines = [
        {"custom_id": c["id"], "method": "POST", "url": "/v1/completions", "body": {"prompt": c["prompt"]}}
        for c in chats
    ]
    text = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x" * 50_000}}
    options: dict[str, Any] = {"backend": "http://127.0.0.1:9/v1", "model": "paid", "dry_run": True}
    found = [
        run(write(tmp_path / "in.jsonl", each), None, **options).shared_prompts for each in (lines, [*lines, text])
    ]
    assert found[0] is not None
    assert found[0].shared_tokens > 0
    assert found[0] == found[1]


def test_a_plan_for_replicas_looks_at_the_longest_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: FakeEngine().core.tokenizer)
    source = write(
        tmp_path / "in.jsonl", [{"prompt": "a" * 90, "max_tokens": 10}, {"prompt": "a" * 91, "max_tokens": 10}]
    )
    report = run(source, None, model="smollm2-135m", replicas=2, max_model_len=100, dry_run=True)
    assert [(each.code, each.lines) for each in report.failures] == [("context_length_exceeded", [2])]


def test_without_prefix_caching_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: FakeEngine().core.tokenizer)
    source = write(tmp_path / "in.jsonl", few_shot(40, 4))
    found = [
        run(source, None, model="smollm2-135m", prefix_caching=on, dry_run=True).shared_prompts for on in (True, False)
    ]
    assert found[0] is not None
    assert found[0].shared_tokens > 0
    assert found[1] is None


@pytest.mark.parametrize("on", [True, False])
def test_whether_a_given_engine_finds_prefixes_is_its_own_setting(tmp_path: Path, on: bool) -> None:
    source = write(tmp_path / "in.jsonl", few_shot(40, 4))
    engine: Any = FakeEngine(config=EngineConfig(prefix_caching=on))
    assert (run(source, None, model=engine, dry_run=True).shared_prompts is not None) == on


class Given(NoModel):
    """An inference of the caller's own, which plans do not ask."""

    models = ("own",)  # type: ignore[assignment]


def test_an_inference_of_the_callers_own_is_no_endpoint_with_a_cache_of_long_prefixes(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", few_shot(40, 4))
    shared = run(source, None, inference=Given(), dry_run=True).shared_prompts
    assert shared is not None
    assert [each.lines for each in shared.prefixes] == [10] * 4
    elsewhere = run(source, None, backend="http://127.0.0.1:9/v1", dry_run=True).shared_prompts
    assert elsewhere is not None
    assert not elsewhere.prefixes


def test_a_plan_takes_lines_without_text(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/responses": {"prompt": {"id": "stored"}}}
    bodies["/v1/rerank"] = {"query": "q", "documents": []}
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    source = write(tmp_path / "in.jsonl", lines)
    report = run(source, None, backend="http://127.0.0.1:9/v1", model="paid", dry_run=True)
    assert (report.failed, report.prompt_tokens) == (0, 0)
    assert [each.text for each in report.first_requests] == [None, None]


def count_at_most(monkeypatch: pytest.MonkeyPatch, prompts: int) -> None:
    """Make every job a large one, of which so many prompts are counted."""
    monkeypatch.setattr(token_counts, "_ALL_COUNTED", 0)
    monkeypatch.setattr(token_counts, "_COUNTED", prompts)


@pytest.mark.parametrize("counted", [0, 1])
def test_a_plan_lets_the_tokenizer_judge_ids_and_empty_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    def judged(prompt: Any) -> list[int]:
        if not prompt or 99999999 in ([] if isinstance(prompt, str) else prompt):
            raise InvalidRequest("not a prompt of this model", param="prompt")
        return encode(prompt)

    count_at_most(monkeypatch, counted)
    engine = FakeEngine()
    engine.core.tokenizer.encode = judged
    prompts: list[Any] = ["text", [1, 99999999], "more", "", [1, 2]]
    source = write(tmp_path / "in.jsonl", [{"prompt": each} for each in prompts])
    report = run(source, None, model=engine, dry_run=True, defaults={"max_tokens": 1})  # type: ignore[arg-type]
    assert (report.failed, [each.lines for each in report.failures]) == (2, [[2, 4]])
    assert report.prompt_tokens == 4 + 4 + 2


@pytest.mark.parametrize("most_counted", [1, 3, 4096])
def test_token_counts_that_are_estimates_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_counted: int
) -> None:
    count_at_most(monkeypatch, most_counted)
    source = write(tmp_path / "in.jsonl", [{"prompt": f"prompt {number}", "max_tokens": 5} for number in range(3)])
    report, stream = run(source, None, model=FakeEngine(slots=2), dry_run=True), io.StringIO()  # type: ignore[arg-type]
    is_estimate = most_counted == 1
    assert (report.prompt_tokens, report.prompt_tokens_estimated) == (24, is_estimate)
    assert [each.is_estimate for each in report.first_requests] == [False, is_estimate, is_estimate]
    show_plan(Console(file=stream, width=300), report)
    shown, about = stream.getvalue(), "about " if is_estimate else ""
    assert f"would fail; {about}24 prompt tokens. " in shown
    assert f"take at most {about}26 tokens of the KV cache" in shown
    for number in (1, 2, 3):
        assert f"/v1/completions, {about * (number > 1)}8 prompt tokens\n" in shown.partition(f"line {number} (")[2]
    assert json.loads(report.to_json())["prompt_tokens_estimated"] == is_estimate


@pytest.mark.parametrize(("prompt", "is_estimate"), [("text", True), ([1, 2, 3], False)])
def test_token_ids_for_an_endpoint_are_counted(tmp_path: Path, prompt: Any, is_estimate: bool) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": prompt, "max_tokens": 5}])
    report, stream = run(source, None, backend="http://127.0.0.1:9/v1", dry_run=True), io.StringIO()
    assert report.prompt_tokens_estimated == is_estimate
    show_plan(Console(file=stream, width=300), report, is_elsewhere=True)
    assert ("about" in stream.getvalue().partition("{")[0]) == is_estimate


class Words:
    """Tokenizer of an encoder of texts of five words, each of which is a token."""

    max_length = 5

    def require_room(self, most: int | None) -> None:
        """Every length will do."""

    def encode_many(self, prompts: Sequence[Any], most: int | None) -> list[list[int] | InvalidRequest]:
        found = [([0] * len(each.split() if isinstance(each, str) else each))[:most] for each in prompts]
        return [each if len(each) <= self.max_length else ContextLengthExceeded("it is too long") for each in found]


def embedded(number: int, given: Any, **more: Any) -> dict[str, Any]:
    body = {"input": given, **more}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/embeddings", "body": body}


@pytest.mark.parametrize("most_counted", [1, 4096])
def test_texts_to_embed_are_counted_by_the_tokenizer_of_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_counted: int
) -> None:
    count_at_most(monkeypatch, most_counted)
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: FakeEngine().core.tokenizer)
    monkeypatch.setattr(loading, "load_text_tokenizer", lambda model: Words())
    inputs: list[Any] = ["two words", ["one", "and one more here too"], "of six words, one too many", [7, 8, 9]]
    lines = [embedded(number, each) for number, each in enumerate(inputs)]
    lines += [embedded(4, "cut to five words, as asked", truncate_prompt_tokens=-1)]
    lines += [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "nine char"}}]
    source = write(tmp_path / "in.jsonl", lines)
    report = run(source, None, model="smollm2-135m", embedding_model="minilm", dry_run=True)
    assert [(each.code, each.lines) for each in report.failures] == [("context_length_exceeded", [3])]
    assert report.failures[0].message == "input[0]: it is too long"
    assert report.prompt_tokens == 2 + 1 + 5 + 3 + 5 + 9
    assert report.prompt_tokens_estimated == (most_counted == 1), "of a text that is cut"
    assert [each.text for each in report.first_requests] == [None] * 3


def test_texts_for_an_encoder_that_surely_fit_are_estimated_where_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_at_most(monkeypatch, 1)
    monkeypatch.setattr(loading, "load_text_tokenizer", lambda model: Words())
    monkeypatch.setattr(Words, "max_length", 100)
    source = write(tmp_path / "in.jsonl", [embedded(number, f"ab{number} cd ef") for number in range(3)])
    report = run(source, None, embedding_model="minilm", dry_run=True)
    assert (report.prompt_tokens, report.prompt_tokens_estimated) == (9, True)


def ranked(number: int, *documents: str, **more: Any) -> dict[str, Any]:
    body = {"query": "two words", "documents": [*documents], **more}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/rerank", "body": body}


def test_texts_that_the_embedding_model_compares_are_counted_as_it_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_text_tokenizer", lambda model: Words())
    lines = [ranked(0, "one", "two of three"), ranked(1, "one", "more than five words are here")]
    lines += [{"custom_id": "s", "method": "POST", "url": "/v1/score", "body": {"text_1": "a b", "text_2": ["c", "d"]}}]
    report = run(write(tmp_path / "in.jsonl", lines), None, embedding_model="minilm", dry_run=True)
    assert [each.message for each in report.failures] == ["documents[1]: it is too long"]
    assert (report.prompt_tokens, report.prompt_tokens_estimated) == (2 + 1 + 3 + 2 + 1 + 1, False)
    with_classifier = run(tmp_path / "in.jsonl", None, embedding_model="minilm", classifiers=["./c"], dry_run=True)
    assert (with_classifier.failed, with_classifier.prompt_tokens_estimated) == (0, True), "which may compare them"


def test_what_keeps_an_embedding_model_from_loading_fails_the_plan_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [embedded(number, "a") for number in range(3)])
    with pytest.raises(ModelNotFound, match="no model is called 'no-such-model'"):
        run(source, None, embedding_model="no-such-model", dry_run=True)
    broken = tmp_path / "broken"
    shutil.copytree(resolve("minilm"), broken)
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=f"the tokenizer of {broken} cannot be loaded: "):
        run(source, None, embedding_model=str(broken), dry_run=True)


def test_texts_to_classify_are_not_counted_by_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: FakeEngine().core.tokenizer)
    bodies: dict[str, dict[str, Any]] = {"/classify": {"input": "abcdefgh"}, "/v1/completions": {"prompt": "abc"}}
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    source = write(tmp_path / "in.jsonl", lines)
    report = run(source, None, model="smollm2-135m", classifiers=["./sentiment"], dry_run=True)
    assert (report.failed, report.prompt_tokens, report.prompt_tokens_estimated) == (0, 2 + 3, True)
    assert [each.is_estimate for each in report.first_requests] == [True, False]
    assert report.planned_answers is not None
    assert not report.planned_answers.kv_is_estimate, "texts to classify take none of it"


def test_a_plan_of_nothing_but_empty_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_at_most(monkeypatch, 0)
    source = write(tmp_path / "in.jsonl", [{"prompt": ""}] * 2)
    assert run(source, None, model=FakeEngine(), dry_run=True).failed == 0  # type: ignore[arg-type]


def test_a_plan_says_what_prompts_share_and_which_lines_are_bad(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*few_shot(40, 4), {"id": "bad"}])
    report = run(source, None, model=FakeEngine(slots=8), dry_run=True, defaults={"max_tokens": 10})  # type: ignore[arg-type]
    assert (report.total, report.failed, report.prompt_tokens) == (
        41,
        1,
        sum(len(b["prompt"]) for b in few_shot(40, 4)),
    )
    assert report.planned_answers is not None
    assert report.planned_answers.at_most == 400
    assert report.planned_answers.kv_tokens == 8 * (max(len(b["prompt"]) for b in few_shot(40, 4)) + 10)
    assert report.shared_prompts is not None
    # Of each prefix of 100 characters one block of 64 is counted.
    assert report.shared_prompts.shared_tokens == pytest.approx(36 * 64, rel=0.01)
    assert [(each.lines, each.text[:1], each.inside) for each in report.shared_prompts.prefixes] == [
        (10, str(number), []) for number in range(4)
    ]


def test_a_plan_shows_the_prompt_that_has_a_prefix(tmp_path: Path) -> None:
    bodies = [{"prompt": [f"{number} " + "Alpha " * 40, "Beta " * 40]} for number in range(6)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    engine = FakeEngine()
    report = run(write(tmp_path / "in.jsonl", lines), tmp_path / "o", model=engine, dry_run=True)  # type: ignore[arg-type]
    assert report.shared_prompts is not None
    [found] = report.shared_prompts.prefixes
    assert found.text.startswith("Beta Beta")


def test_a_plan_shows_token_ids_as_numbers(tmp_path: Path) -> None:
    bodies = [{"prompt": [27, *range(300, 1400), number]} for number in range(6)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    report = run(write(tmp_path / "in.jsonl", lines), None, backend="http://127.0.0.1:9/v1", dry_run=True)
    assert report.shared_prompts is not None
    [found] = report.shared_prompts.prefixes
    assert found.text.startswith("token ids 27, 300, 301, 302")


def test_a_plan_says_which_lines_are_longer_than_the_context(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"id": "fits", "prompt": "a" * 90, "max_tokens": 10},
        {"id": "long prompt", "prompt": "a" * 101},
        {"id": "long answer", "prompt": "a" * 90, "max_tokens": 11},
        {"id": "any answer", "prompt": "a" * 99},
        {"id": "scored", "prompt": "a" * 101, "max_tokens": 0, "echo": True},
        {"id": "scored, too long", "prompt": "a" * 102, "max_tokens": 0, "echo": True},
    ]
    source = write(tmp_path / "in.jsonl", bodies)
    engine = FakeEngine(max_model_len=100)
    report = run(source, None, model=engine, dry_run=True, defaults={"max_tokens": 1})  # type: ignore[arg-type]
    assert [(each.code, each.lines) for each in report.failures] == [("context_length_exceeded", [2, 3, 6])]
    source = write(tmp_path / "in.jsonl", bodies[-1:])
    [failure] = run(source, None, model=engine, dry_run=True).failures  # type: ignore[arg-type]
    assert "102 prompt tokens and max_tokens=0" in failure.message
    assert report.prompt_tokens == 90 + 99 + 101


def test_a_plan_says_which_lines_are_longer_than_the_kv_cache_of_an_engine(tmp_path: Path) -> None:
    engine = FakeEngine(slots=4)
    engine.stats.kv_blocks = 4  # of 16 tokens
    bodies = [{"prompt": "a" * 60, "max_tokens": tokens} for tokens in (4, 5)]
    [failure] = run(write(tmp_path / "in.jsonl", bodies), None, model=engine, dry_run=True).failures  # type: ignore[arg-type]
    assert (failure.code, failure.lines) == ("context_length_exceeded", [2])
    assert "need 65 tokens of KV cache, which holds 64: lower max_tokens" in failure.message


def named(model: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": model, "method": "POST", "url": url, "body": {"model": model, **(body or {"prompt": "a"})}}


def test_a_plan_says_which_lines_name_a_model_that_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_tokenizer", lambda *_: FakeEngine().core.tokenizer)
    monkeypatch.setattr(loading, "load_text_tokenizer", lambda model: Words())
    lines = [named(each) for each in ("smollm2-135m", "gpt-4o-mini", "minilm")]
    lines += [named(each, "/v1/embeddings", input="a") for each in ("minilm", "text-embedding-3-small")]
    options: dict[str, Any] = {"model": "smollm2-135m", "embedding_model": "minilm", "dry_run": True}
    source = write(tmp_path / "in.jsonl", [{**each, "custom_id": str(place)} for place, each in enumerate(lines)])
    report = run(source, None, **options)
    assert [(each.code, each.lines) for each in report.failures] == [("model_not_found", [2, 3, 5])]
    assert report.failures[0].message == "model='gpt-4o-mini' is not served here: choose from smollm2-135m"
    assert run(source, None, served_model_names=["gpt-4o-mini", "minilm"], **options).failed == 1
    assert run(source, None, served_model_names=["*"], **options).failed == 0
    given = run(source, None, model=FakeEngine(), dry_run=True)  # type: ignore[arg-type]
    assert given.failed == 0, "what it is called is its own matter"


def test_a_plan_has_an_example_of_each_field_at_fault(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [{"temperature": 5}, {"max_tokens": -3}, {"temperature": 7}]
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", **each} for each in faults])
    report = run(source, None, model=FakeEngine(), dry_run=True)  # type: ignore[arg-type]
    assert [(each.param, each.lines) for each in report.failures] == [("temperature", [1, 3]), ("max_tokens", [2])]


def test_a_plan_counts_all_completions_of_a_line(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "abc", "n": 4, "max_tokens": 100, "expected_tokens": 20}]
    bodies += [{"prompt": "abcde", "max_tokens": 10, "ignore_eos": True}]
    source = write(tmp_path / "in.jsonl", bodies)
    report = run(source, None, model=FakeEngine(slots=3), dry_run=True)  # type: ignore[arg-type]
    assert report.planned_answers is not None
    assert (report.planned_answers.at_most, report.planned_answers.expected) == (410, 90)
    assert report.planned_answers.kv_tokens == 3 * 103
    source = write(tmp_path / "in.jsonl", [*bodies, {"prompt": "open", "max_tokens": 10}])
    report = run(source, None, model=FakeEngine(slots=3), dry_run=True)  # type: ignore[arg-type]
    assert report.planned_answers is not None
    assert (report.planned_answers.at_most, report.planned_answers.expected) == (420, None)
    report = run(source, None, model=FakeEngine(slots=3), dry_run=True, defaults={"ignore_eos": True})  # type: ignore[arg-type]
    assert report.planned_answers is not None
    assert report.planned_answers.expected == report.planned_answers.at_most == 420


def test_a_plan_counts_the_completions_that_lines_do_not_state_themselves(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": "abc"}, {"prompt": "abcd", "n": 2}, {"prompt": "abcde", "n": None}]
    source = write(tmp_path / "in.jsonl", [{**body, "expected_tokens": 4} for body in bodies])
    defaults = {"n": 3, "max_tokens": 10}
    here = run(source, None, model=FakeEngine(slots=8), dry_run=True, defaults=defaults).planned_answers  # type: ignore[arg-type]
    assert here is not None
    assert (here.at_most, here.expected) == (8 * 10, 8 * 4)
    elsewhere = run(source, None, backend="http://localhost:1/v1", dry_run=True, defaults=defaults).planned_answers
    assert elsewhere is not None
    assert (elsewhere.at_most, elsewhere.expected) == (6 * 10, 6 * 4), "an endpoint understands null as one"


def test_what_the_order_of_the_input_finds_depends_on_the_cache(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", few_shot(40, 4))
    found = []
    for blocks in (1, 1000):
        engine = FakeEngine(slots=2)
        engine.stats.kv_blocks = blocks * 4
        report = run(source, None, model=engine, dry_run=True)  # type: ignore[arg-type]
        assert report.shared_prompts is not None
        assert report.shared_prompts.cache_tokens == blocks * 4 * engine.stats.block_size
        found.append((report.shared_prompts.shared_in_input_order, report.shared_prompts.shared_tokens))
    (in_small, _), (in_large, shared) = found
    assert in_small == 0
    assert in_large == shared > 0
