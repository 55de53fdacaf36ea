"""What an engine refuses: requests, arguments and settings, each by name and each alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchwright import Engine, InferenceRequest, SamplingParams
from batchwright.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from batchwright.request import Prompt

from .support import GREEDY, STORY, only, run


@pytest.mark.parametrize(
    ("prompt", "params", "message", "param"),
    [
        ("", GREEDY, "prompt is empty", "prompt"),
        ([49152], GREEDY, "token id 49152: the model has ids 0 to 49151", "prompt"),
        ([5] * 600, GREEDY, "exceed the context of 512 tokens", "prompt"),
        ("x" * 10**5, GREEDY, "100,000 characters has at least 1,235 tokens", "prompt"),
        ([{"role": "user", "content": "x" * 10**5}], GREEDY, "exceed the context of 512 tokens", "prompt"),
        (" " * 81 * 40, GREEDY, None, None),
        ([5] * 500, GREEDY, None, None),
        (STORY, replace(GREEDY, stop_token_ids=(10**6,)), "1000000 in stop_token_ids", "stop_token_ids"),
        (STORY, replace(GREEDY, logit_bias={49152: 1.0}), "49152 in stop_token_ids or logit_bias", "logit_bias"),
    ],
    ids=[
        "empty",
        "token id",
        "too long",
        "long text",
        "long chat",
        "many characters",
        "just short enough",
        "stop id",
        "bias id",
    ],
)
def test_a_bad_request_fails_alone(
    engine: Engine, prompt: Any, params: SamplingParams, message: str | None, param: str | None
) -> None:
    before, response, after = engine.generate([STORY, prompt, STORY], [GREEDY, params, GREEDY])
    assert before.output == after.output != ""
    if message is None:
        assert response.error is None
        return
    assert isinstance(response.error, InvalidRequest)
    assert message in str(response.error)
    assert response.error.param == param
    assert response.finish_reason == "error"
    with pytest.raises(InvalidRequest):
        engine.submit(InferenceRequest.of(prompt, params))
    (event,) = engine.stream(prompt, params)
    assert event.response is not None
    assert isinstance(event.response.error, InvalidRequest)


def test_more_than_the_kv_cache_can_hold(smollm2_path: Path) -> None:
    with Engine(smollm2_path, dtype="float32", kv_memory=30 * 2 * 3 * 64 * 4 * 16 * 4) as small:
        fits, too_much = small.generate([[5] * 52, [5] * 53], GREEDY)
        assert fits.error is None
        assert isinstance(too_much.error, ContextLengthExceeded)
        assert "raise kv_memory" in str(too_much.error)


def test_a_chat_template_that_refuses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.core.tokenizer._inner, "chat_template", "{{ raise_exception('no such role') }}")
    prompts: list[Prompt] = [STORY, [{"role": "poet", "content": "x"}]]
    good, bad = engine.generate(prompts, GREEDY)
    assert good.error is None
    assert isinstance(bad.error, InvalidRequest)
    assert "no such role" in str(bad.error)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% if message.role == 'system' %}", "system"),
        ("{% if message.role in ('system', 'developer') %}", "developer"),
        ('{% if message.role == "developer" %}', "developer"),
    ],
)
def test_developers_are_called_system_by_templates_that_do_not_name_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, template: str, role: str
) -> None:
    whole = (
        "{% for message in messages %}" + template + "{% endif %}{{ message.role }}: {{ message.content }}{% endfor %}"
    )
    tokenizer = engine.core.tokenizer
    monkeypatch.setattr(tokenizer._inner, "chat_template", whole)
    assert tokenizer.decode(tokenizer.encode([{"role": "developer", "content": "x"}])) == f"{role}: x"
    assert tokenizer.decode(tokenizer.encode([{"role": "user", "content": "x"}])) == "user: x"


def test_a_nucleus_of_nothing_is_the_likeliest_token(engine: Engine) -> None:
    nucleus = SamplingParams(max_tokens=12, temperature=1.5, top_p=0.0)
    first, second = engine.generate([STORY] * 2, [GREEDY, nucleus])
    assert first.token_ids == second.token_ids


def test_duplicate_ids(engine: Engine) -> None:
    requests = [InferenceRequest(STORY, request_id="same", max_tokens=3) for _ in range(2)]
    with pytest.raises(ValueError, match="request_id"):
        engine.generate(requests)
    engine.submit(requests[0])
    with pytest.raises(InvalidRequest, match="'same' is being computed already"):
        engine.submit(requests[1])
    assert [response.error for response in run(engine)] == [None]
    engine.submit(requests[1])  # the first has ended, so the id is free again
    assert only(run(engine)).request_id == "same"


def test_arguments_that_do_not_match(engine: Engine) -> None:
    with pytest.raises(ValueError, match="2 for 3 prompts"):
        engine.generate([STORY] * 3, [GREEDY] * 2)
    with pytest.raises(ValueError, match="requests bring their own"):
        engine.stream([InferenceRequest(STORY)], GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_tokens": 0}, "max_batch_tokens=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 10**6}, "max_model_len=1000000"),
        ({"kv_memory": "much"}, "kv_memory='much'"),
        ({"kv_memory": 1000}, "one KV block of this model takes"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "abacus"}, "device='abacus'"),
        ({"body": "soul"}, "body='soul'"),
        ({"attention": "full"}, "attention='full'"),
    ],
    ids=str,
)
def test_bad_settings(smollm2_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(smollm2_path, **({"kv_memory": "1MB"} | options))


def test_what_is_no_prompt_fails_alone(engine: Engine) -> None:
    responses = engine.generate([STORY, [], [-1], 5], GREEDY)  # type: ignore[arg-type]
    assert [response.error is None for response in responses] == [True, False, False, False]
    assert all(isinstance(response.error, InvalidRequest) for response in responses[1:])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, None, "prompts of type NoneType"),
        (5, None, "prompts of type int"),
        (b"x", None, "prompts of type bytes"),
        ({"a": 1}, None, "prompts of type dict"),
        (["a"], {"max_tokens": 2}, "sampling_params of type dict"),
        ([InferenceRequest("a")], SamplingParams(), "requests bring their own"),
        ([InferenceRequest("a"), "b"], None, "either requests or prompts"),
    ],
)
def test_arguments_of_another_kind_are_refused(engine: Engine, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params)


def test_an_embedding_model_is_refused_before_anything_is_fetched() -> None:
    with pytest.raises(UnsupportedModel, match="makes embeddings"):
        Engine("minilm")


def test_a_damaged_file_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    for file in smollm2_path.glob("*.json"):
        shutil.copy(file, tmp_path)
    with (smollm2_path / "model.safetensors").open("rb") as whole:
        (tmp_path / "model.safetensors").write_bytes(whole.read(1_000_000))
    for body in ("fused", "transformers"):
        with pytest.raises(UnsupportedModel, match=r"model\.safetensors|cannot load"):
            Engine(tmp_path, body=body)


def test_more_kv_memory_than_there_is(smollm2_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_memory='9000GiB': .* are free; give less"):
        Engine(smollm2_path, kv_memory="9000GiB", max_num_seqs=10**9)
