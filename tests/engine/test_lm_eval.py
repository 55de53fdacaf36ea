"""lm-evaluation-harness through the engine: the answers of its own `hf` model, on tasks that need no network."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchwright.errors import InvalidRequest

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from batchwright.lm_eval import Model

pytestmark = pytest.mark.needs_model

QUESTIONS = [
    ("The capital of France is", ["Paris", "Berlin", "Madrid"], 0),
    ("Seven plus five equals", ["ten", "twelve", "a number that is greater than thirteen"], 1),
    ("A baby dog is called a", ["kitten", "puppy", "calf"], 1),
    ("Water freezes into", ["steam that rises", "ice", "gold"], 1),
    ("The largest planet is", ["Mars", "Jupiter", "the moon of the Earth"], 1),
    ("Bees make", ["milk", "wool", "honey"], 2),
]


@pytest.fixture(scope="module")
def ours(smollm2_path: Path) -> Iterator[Model]:
    model = Model(str(smollm2_path), dtype="float32", kv_memory="100MB", max_length=96, batch_size=1)
    yield model
    model.close()


@pytest.fixture(scope="module")
def theirs(smollm2_path: Path) -> Any:
    # In batches, lm-eval 0.4.13 gives wrong sums for texts of several windows, of which the last one is shorter.
    return HFLM(pretrained=str(smollm2_path), dtype="float32", device="cpu", batch_size=1, max_length=96)


def asked(*arguments: Any) -> Any:
    return [SimpleNamespace(args=each) for each in arguments]


def test_a_task_has_the_accuracy_of_the_hf_model(tmp_path: Path, ours: Model, theirs: Any) -> None:
    lines = [{"question": question, "choices": choices, "answer": answer} for question, choices, answer in QUESTIONS]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "task": "quiz",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "quiz.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (tmp_path / "quiz.yaml").write_text(json.dumps(config))  # JSON is YAML
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = [
        lm_eval.simple_evaluate(model=model, tasks=["quiz"], task_manager=manager, bootstrap_iters=0)
        for model in (ours, theirs)
    ]
    accuracies = [[each["results"]["quiz"][name] for name in ("acc,none", "acc_norm,none")] for each in found]
    assert accuracies[0] == accuracies[1]
    assert 0.5 < accuracies[0][0] <= 1
    answers = [[sample["filtered_resps"] for sample in each["samples"]["quiz"]] for each in found]
    for mine, other in zip(*answers, strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
        assert [value for value, _ in mine] == pytest.approx([value for value, _ in other], abs=1e-3)


def test_likelihoods_of_pairs_and_of_long_texts(ours: Model, theirs: Any) -> None:
    text = " ".join(question + " " + choices[answer] + "." for question, choices, answer in QUESTIONS * 9)
    pairs = asked(
        ("", "Once upon a time"), ("The sky ", "is blue"), ("Two\n", "three"), (text, " the end"), ("a", "b" * 40)
    )
    mine, other = (model.loglikelihood(pairs, disable_tqdm=True) for model in (ours, theirs))
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert [value for value, _ in mine] == pytest.approx([value for value, _ in other], abs=2e-3)
    texts = asked((text,), ("Short.",), (text[100:900],))
    # The long ones take several windows.
    assert len(ours.tok_encode(text)) > 2 * ours.max_length
    mine, other = (model.loglikelihood_rolling(texts, disable_tqdm=True) for model in (ours, theirs))
    assert mine == pytest.approx(other, abs=2e-2)
    assert all(map(math.isfinite, mine))


def test_what_is_too_long_loses_its_beginning_with_a_warning(
    ours: Model, theirs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def scored(model: Any, *pairs: tuple[list[int], list[int]]) -> Any:
        found = model._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)
        return [value for value, _ in found], [greedy for _, greedy in found]

    tokens = ours.tok_encode(" ".join(question for question, *_ in QUESTIONS * 9))
    most = ours.max_length
    fitting = (tokens[:40], tokens[40 : most + 1])
    # Of the last one, the context is cut to a token, which its continuation leaves room for.
    pairs = [fitting, (tokens[:60], tokens[60 : most + 20]), (tokens[:9], tokens[9 : most + 9])]
    (mine, mine_greedy), (other, other_greedy) = scored(ours, *pairs), scored(theirs, *pairs)
    assert mine == pytest.approx(other, abs=2e-3)
    assert mine_greedy == other_greedy
    own = [each.getMessage() for each in caplog.records if each.name == "batchwright.lm_eval"]
    assert own == ["2 of 3 contexts are longer than the model takes: they lose their first tokens, up to 19"]
    # By itself too long, where the other model ends the run: the last tokens that fit, after the one before them.
    caplog.clear()
    with pytest.raises(AssertionError):
        scored(theirs, (tokens[:9], tokens[9 : most + 20]))
    cut = scored(ours, (tokens[:9], tokens[9 : most + 20]))
    assert cut == scored(ours, (tokens[19:20], tokens[20 : most + 20]))
    told = [each.getMessage() for each in caplog.records if each.name == "batchwright.lm_eval"]
    assert told == [
        "1 of 1 contexts are longer than the model takes: they lose their first tokens, up to 8",
        "1 of 1 continuations are longer than the model takes: they lose their first tokens, up to 11",
    ]


def test_texts_that_are_generated_until_a_stop(ours: Model, theirs: Any) -> None:
    settings: dict[str, Any] = {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False}
    requests = asked(*((question, settings) for question, *_ in QUESTIONS), ("word " * 200, settings))
    mine, other = (model.generate_until(requests, disable_tqdm=True) for model in (ours, theirs))
    assert mine == other
    sampled = asked(("Once", {"until": "x", "max_new_tokens": 4, "do_sample": True, "seed": 1, "top_p": 0.9}))
    assert ours.generate_until(sampled, disable_tqdm=True) == ours.generate_until(sampled, disable_tqdm=True)
    with pytest.raises(InvalidRequest, match="num_beams=4"):
        ours.generate_until(asked(("a", {"num_beams": 4})))
    with pytest.raises(ValueError, match="max_gen_toks=96: must be less than the 96 tokens"):
        ours.generate_until(asked(("a", {"max_gen_toks": 96})))


def test_chats_are_rendered_by_the_template(ours: Model, theirs: Any) -> None:
    chat = [{"role": "user", "content": "Name a river."}]
    for prompted in (True, False):
        assert ours.apply_chat_template(chat, prompted) == theirs.apply_chat_template(chat, prompted)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name
    assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)


@pytest.mark.parametrize("option", [{"max_length": 64}, {"device": "cpu"}, {"dtype": "float32"}])
def test_an_engine_that_is_given_has_its_own_options(ours: Model, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}: the engine that is given has its own; leave it out"):
        Model(ours.engine, **option)
    assert Model(ours.engine, batch_size=8).engine is ours.engine


def test_the_harness_knows_it_by_its_name() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("batchwright") is Model
    done = subprocess.run(
        [sys.executable, "-m", "batchwright.lm_eval", "--help"], capture_output=True, text=True, check=True
    )
    assert "lm_eval" in done.stdout or "lm-eval" in done.stdout
