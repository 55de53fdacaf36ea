"""Static padded generation: each row as if it were alone, with parameters of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright import (
    Batcher,
    ContextLengthExceeded,
    Engine,
    InferenceRequest,
    InferenceResponse,
    InvalidRequest,
    NonFiniteLogits,
    SamplingParams,
    StaticGenerator,
    UnsupportedModel,
)

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], [20, 21, 22, 23, 24, 25, 26, 27, 28], [5, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama for which token 13 is not a number."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.model.embed_tokens.weight.data[13] = torch.nan
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def generator(folder: Path) -> StaticGenerator:
    return StaticGenerator(folder, dtype="float32")


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> StaticGenerator:
    return StaticGenerator(smollm2_path, dtype="float32")


def test_greedy_equals_generate_one_at_a_time(smollm2_path: Path, real: StaticGenerator) -> None:
    from transformers import AutoModelForCausalLM

    prompts = ["The capital of France is", "Once upon a time there was a small fox who lived", "1, 2,"]
    answers: list[Any] = real.generate_batch(prompts, [GREEDY] * 3)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = real.tokenizer.encode(prompt)
        row = torch.tensor([ids])
        own = model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert list(answer.token_ids) == own[0, len(ids) :].tolist()
        assert answer.output == real.tokenizer.decode(answer.token_ids)
        assert (answer.tokens_generated, answer.usage.prompt_tokens, answer.finish_reason) == (6, len(ids), "length")


def test_a_batcher_answers_with_its_own_times_and_counts(real: StaticGenerator) -> None:
    async def ask() -> Any:
        async with Batcher(real) as batcher:
            request = InferenceRequest("1, 2, 3,", max_tokens=4, temperature=0.0, request_id="r", metadata={"a": 1})
            return await batcher.add_request(request)

    answer = asyncio.run(ask())
    assert (answer.request_id, answer.metadata, answer.error) == ("r", {"a": 1}, None)
    assert answer.tokens_generated == len(answer.token_ids) == 4
    assert answer.usage.prompt_tokens == len(real.tokenizer.encode("1, 2, 3,"))


def test_every_row_has_its_own_parameters(folder: Path, generator: StaticGenerator) -> None:
    params = [
        SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, seed=7, top_k=5, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.8, seed=1, top_p=0.9, n=2, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=7, temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5, ignore_eos=True),
    ]
    answers: list[Any] = generator.generate_batch(PROMPTS, params)
    assert [len(answer.token_ids) for answer in answers] == [3, 9, 5, 7]
    assert [len(answer.choices) for answer in answers] == [1, 1, 2, 1]
    assert answers[2].choices[1].logprobs is not None
    for prompt, each, answer in zip(PROMPTS, params, answers, strict=True):
        alone: Any = generator.generate_batch([prompt], [each])[0]
        assert [choice.token_ids for choice in alone.choices] == [choice.token_ids for choice in answer.choices]
    with Engine(folder, dtype="float32", kv_memory="10MB") as engine:
        same = engine.generate(PROMPTS, params)
    assert [[c.token_ids for c in a.choices] for a in same] == [[c.token_ids for c in a.choices] for a in answers]


def test_a_row_ends_at_its_stop_token_and_the_others_go_on(generator: StaticGenerator) -> None:
    plain: list[Any] = generator.generate_batch(PROMPTS, [GREEDY] * 4)
    stop = plain[0].token_ids[1]
    first = plain[0].token_ids.index(stop)
    stopping = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    answers: list[Any] = generator.generate_batch(PROMPTS, [stopping, GREEDY, GREEDY, GREEDY])
    assert (answers[0].finish_reason, len(answers[0].token_ids)) == ("stop", first + 1)
    assert [a.token_ids for a in answers[1:]] == [a.token_ids for a in plain[1:]]


def test_a_stop_text_is_no_part_of_the_output(real: StaticGenerator) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, stop=(" 5",))
    answer: Any = real.generate_batch(["Count: 1, 2, 3,"], [params])[0]
    assert answer.finish_reason == "stop"
    assert answer.output.endswith("4,")


def test_what_no_tokenizer_takes_fails_alone(real: StaticGenerator) -> None:
    outputs: list[Any] = real.generate_batch(["1, 2,", "\ud800 x", b"x", [2**70]], [GREEDY] * 4)
    kinds = [type(output) for output in outputs]
    assert kinds == [InferenceResponse, InvalidRequest, InvalidRequest, InvalidRequest]


def test_loading_shows_no_progress_bars(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    StaticGenerator(folder, dtype="float32")
    assert "Loading weights" not in capfd.readouterr().err


def test_what_cannot_be_computed_fails_alone(generator: StaticGenerator) -> None:
    prompts = [[5, 6, 7], None, "no tokenizer", [5] * 251, [13, 5], [10**6], [5, 6, 7]]
    answers: list[Any] = generator.generate_batch(prompts, [GREEDY] * 7)
    kinds = [type(answer.error if hasattr(answer, "error") else answer) for answer in answers]
    none = type(None)
    assert kinds == [
        none, InvalidRequest, InvalidRequest, ContextLengthExceeded, NonFiniteLogits, InvalidRequest, none
    ]  # fmt: skip
    assert answers[0].token_ids == answers[6].token_ids
    assert generator.generate_batch([]) == []
    assert all(isinstance(answer, InvalidRequest) for answer in generator.generate_batch([None]))


def test_as_many_requests_as_prompts(generator: StaticGenerator) -> None:
    with pytest.raises(ValueError, match="1 for 2 prompts"):
        generator.generate_batch([[5], [6]], [None])


def test_a_model_or_setting_that_does_not_do_is_refused(folder: Path, minilm_path: Path) -> None:
    with pytest.raises(ValueError, match="max_model_len=1000"):
        StaticGenerator(folder, max_model_len=1000)
    with pytest.raises(UnsupportedModel, match="no causal language model"):
        StaticGenerator(minilm_path)
