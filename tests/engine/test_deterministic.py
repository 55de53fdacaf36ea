"""`deterministic=True`: the same bits alone, in company, preempted, cached, in small steps; or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import AsyncEngine, Choice, Engine, InferenceRequest, InferenceResponse, SamplingParams
from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.linear import Linear, make_linear, make_quantized_linear, rounds_by_company
from batchwright.engine.bodies.llama import LlamaBody
from batchwright.engine.native import load_kernels
from batchwright.engine_config import EngineConfig
from batchwright.errors import UnsupportedModel

from .support import TINY, nothing_left, only, tiny_model

_KERNELS = load_kernels(torch.float32)
needs_native = pytest.mark.skipif(isinstance(_KERNELS, str), reason=f"no compiled kernels: {_KERNELS}")

Options = dict[str, Any]
PRECISIONS: dict[str, Options] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
precisions = pytest.mark.parametrize("precision", PRECISIONS)

_FREE = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_DRAWN = replace(_FREE, temperature=0.9)
PARAMS = (
    _FREE,
    replace(_FREE, logprobs=4),
    replace(_FREE, repetition_penalty=1.3, presence_penalty=0.4, max_tokens=11),
    replace(_FREE, max_tokens=14),
    replace(_DRAWN, seed=1),
    replace(_DRAWN, seed=2, logprobs=0),
    replace(_DRAWN, seed=3, top_p=0.9, logprobs=5),
    replace(_DRAWN, seed=4, top_k=20, min_p=0.02),
    replace(_DRAWN, seed=5, n=2, logprobs=1),
    replace(_DRAWN, seed=6, frequency_penalty=0.5, temperature=0.6, max_tokens=13),
    replace(_DRAWN, seed=7, temperature=2.0, max_tokens=12),
    replace(_DRAWN, seed=8, logit_bias={7: 3.0}, min_tokens=4, logprobs=2),
)


def requests_of(prompts: list[list[int]], **more: Any) -> list[InferenceRequest]:
    return [InferenceRequest.of(prompt, PARAMS[index % len(PARAMS)], **more) for index, prompt in enumerate(prompts)]


def renamed(requests: list[InferenceRequest], tag: str, **more: Any) -> list[InferenceRequest]:
    """The same work under other ids, so that it can be submitted twice at once."""
    return [replace(request, request_id=f"{tag}-{index}", **more) for index, request in enumerate(requests)]


def bits(responses: list[InferenceResponse]) -> list[tuple[Choice, ...]]:
    """Everything that a request gives: tokens, text, log-probabilities."""
    assert [response.error for response in responses] == [None] * len(responses)
    return [response.choices for response in responses]


def alone(engine: Engine, requests: list[InferenceRequest]) -> list[tuple[Choice, ...]]:
    return [bits(engine.generate([request]))[0] for request in requests]


def promising(folder: Path, **options: Any) -> Engine:
    """An engine that promises it; the test is skipped where this processor's torch cannot keep the promise."""
    try:
        return Engine(folder, **options, device="cpu", deterministic=True)
    except UnsupportedModel as error:
        if "torch's products on this processor" not in str(error):
            raise
        pytest.skip(str(error))


def blocks(folder: Path, count: int, precision: str) -> int:
    """Bytes of KV cache for `count` blocks."""
    options: Options = {"quantization": None} | PRECISIONS[precision]
    body = load_body(folder, EngineConfig(body="auto", device="cpu", **options))
    return count * sum(shape.bytes_per_block for shape in body.kv_shapes(1, 16, "auto"))


# The real model


@needs_native
@precisions
def test_the_real_model(shallow_path: Path, prompts: list[list[int]], precision: str) -> None:
    dozen = requests_of([prompts[index] for index in (0, 1, 4, 6, 7, 11, 13, 17, 20, 34, 35, 22)])
    company = renamed(requests_of(prompts[2:20:3]), "company")
    options = PRECISIONS[precision] | {"max_model_len": 256}
    with promising(shallow_path, **options, kv_memory="100MB", prefix_caching=False) as engine:
        expected = alone(engine, dozen)
        assert len(set(expected)) == len(dozen)
        assert bits(engine.generate(company + dozen))[len(company) :] == expected
    small = blocks(shallow_path, 14, precision)
    with promising(shallow_path, **options, kv_memory=small, max_batch_tokens=48) as engine:
        assert bits(engine.generate(dozen)) == expected
        assert engine.stats.preemptions > 0
        for index in (5, 9):
            responses = engine.generate(dozen[index : index + 1]) + engine.generate(dozen[index : index + 1])
            assert bits(responses) == [expected[index]] * 2
            assert responses[1].usage.cached_tokens == (len(dozen[index].prompt) - 1) // 16 * 16 > 0


# Tiny models, whose products go through torch or through the compiled layers


@dataclass(frozen=True)
class Small:
    """A tiny model in one precision: requests with what they give alone, and an engine with little of everything."""

    requests: list[InferenceRequest]
    expected: list[tuple[Choice, ...]]
    engine: Engine


_SHAPES: dict[str, Options] = {
    "llama": TINY,
    "nine-heads": TINY | {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    "windowed": TINY | {"sliding_window": 21, "num_attention_heads": 2, "num_key_value_heads": 1},
}


def tiny_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    several = [torch.randint(2, 199, (n,), generator=generator).tolist() for n in (1, 2, 9, 15, 16, 17, 31, 33, 47, 60)]
    return [*several, several[-1][:32] + several[2], several[-1][:48] + several[4]]


@pytest.fixture(
    scope="module",
    params=[pytest.param((shape, name), id=f"{shape}-{name}") for shape in _SHAPES for name in PRECISIONS],
)
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, two_threads: None
) -> Iterator[Small]:
    shape, precision = request.param
    folder = tmp_path_factory.mktemp(shape)
    tiny_model(folder, "mistral" if shape == "windowed" else "llama", **_SHAPES[shape])
    options = PRECISIONS[precision] | {"max_model_len": 128}
    requests = requests_of(tiny_prompts())
    with promising(folder, **options, kv_memory="2MB", prefix_caching=False) as engine:
        expected = alone(engine, requests)
    few = blocks(folder, 8, precision)
    with promising(folder, **options, kv_memory=few, max_batch_tokens=13, max_num_seqs=9) as engine:
        yield Small(requests, expected, engine)
        assert nothing_left(engine)


@needs_native
def test_preempted_and_in_pieces(small: Small) -> None:
    stats = small.engine.stats
    before = stats.preemptions, stats.cached_tokens
    assert len(set(small.expected)) == len(small.requests)
    assert bits(small.engine.generate(small.requests)) == small.expected
    assert stats.preemptions > before[0]
    assert stats.cached_tokens > before[1]


@needs_native
@settings(max_examples=8, deadline=None)
@given(
    chosen=st.lists(st.integers(0, 11), min_size=1, max_size=6),
    company=st.lists(st.lists(st.integers(2, 198), min_size=1, max_size=70), max_size=12),
    priorities=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    order=st.randoms(use_true_random=False),
)
def test_any_company(
    small: Small, chosen: list[int], company: list[list[int]], priorities: tuple[int, int], order: Any
) -> None:
    wanted = renamed([small.requests[index] for index in chosen], "wanted", priority=priorities[0])
    everybody = wanted + renamed(requests_of(company), "company", priority=priorities[1], traffic="batch")
    order.shuffle(everybody)
    found = {response.request_id: response for response in small.engine.generate(everybody)}
    assert bits([found[request.request_id] for request in wanted]) == [small.expected[index] for index in chosen]


@needs_native
def test_cancelled_company_changes_nothing(small: Small) -> None:
    others = renamed(small.requests, "others")
    for request in [*others, small.requests[9]]:
        small.engine.submit(request)
    found, steps = {}, 0
    while small.engine.unfinished:
        found.update({response.request_id: response for response in small.engine.step()})
        steps += 1
        if steps % 3 == 0 and others:
            small.engine.cancel(others.pop().request_id)
    assert bits([found[small.requests[9].request_id]]) == [small.expected[9]]


# What is refused


def refusal(folder: Path, config: Options = TINY, **options: Any) -> str:
    tiny_model(folder, "llama", **config)
    settings: Options = {"dtype": "float32", "device": "cpu", "kv_memory": "1MB", "deterministic": True}
    with pytest.raises(UnsupportedModel, match="deterministic=True is not possible: ") as caught:
        Engine(folder, **settings | options)
    return str(caught.value)


def test_the_transformers_body_is_refused(tmp_path: Path) -> None:
    assert "transformers body leaves products to torch" in refusal(tmp_path, body="transformers")
    with pytest.raises(UnsupportedModel, match=r"use body='auto' with a model of the Llama family"):
        AsyncEngine(tmp_path, dtype="float32", kv_memory="1MB", body="transformers", deterministic=True)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_other_attention_is_refused(tmp_path: Path, attention: str) -> None:
    told = refusal(tmp_path, attention=attention)
    assert f"{attention} attention may round a row differently" in told
    assert "needs a C++ compiler" in told


@needs_native
@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({}, {"dtype": "float16"}, "no kernels for torch.float16"),
        ({"head_dim": 24}, {}, "head size divisible by 16, not 24"),
        ({"hidden_size": 60, "intermediate_size": 90, "head_dim": 16}, {}, "intermediate size divisible by 16"),
        (
            {"hidden_size": 60, "intermediate_size": 90, "head_dim": 16},
            {"quantization": "int8"},
            "intermediate size divisible by 16",
        ),
    ],
)
def test_what_stands_in_the_way_is_named(tmp_path: Path, config: Options, options: Options, reason: str) -> None:
    assert reason in refusal(tmp_path, TINY | config, **options)


@needs_native
def test_products_that_round_by_company_are_found_and_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    with Engine(tmp_path, dtype="float32", kv_memory="1MB") as engine:
        body = engine.core.body
        assert isinstance(body, LlamaBody)
        stack: Any = body.stack
        stack._head = by_company(make_quantized_linear(torch.ones(5, 64)))
        told = body.why_not_deterministic(64, 8)
        assert told is not None
        assert "among 5 rows than among 8; use quantization='int8'" in told


def by_company(product: Linear) -> Linear:
    """`product`, but with other bits for five to seven rows."""
    return lambda x: product(x) * (1 + 2**-20 if 5 <= x.shape[0] <= 7 else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [make_linear, make_quantized_linear])
def test_products_of_many_numbers_of_rows(dtype: torch.dtype, make: Any) -> None:
    weight = torch.randn(112, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    product = make(weight)
    if make is make_quantized_linear:
        assert rounds_by_company(product, 48, dtype, 100) is None
    assert rounds_by_company(lambda x: product(x) + (x.shape[0] == 33), 48, dtype, 100) in range(1, 34)
    assert rounds_by_company(product, 48, dtype, 1) is None


def test_not_asked_for_nothing_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    with Engine(tmp_path, dtype="float32", kv_memory="1MB", body="transformers") as engine:
        assert only(engine.generate([[5, 6]], _FREE)).error is None
