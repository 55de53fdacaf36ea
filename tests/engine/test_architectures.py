"""Tiny random models of many architectures equal their own `generate`; those that cannot be right are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright import Engine, SamplingParams
from batchwright.engine.native import NativeKernels
from batchwright.errors import UnsupportedModel

from .support import TINY, own_greedy, tiny_model

_NEW = 10
_WINDOW: dict[str, Any] = {"sliding_window": 9}
_MIXED: dict[str, Any] = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
_HEAD: dict[str, Any] = {"head_dim": 16}
_GPT2: dict[str, Any] = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OPT: dict[str, Any] = TINY | {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}


def random_prompts() -> list[list[int]]:
    """Shorter and longer than the windows, at and beside the edges of blocks, two with a common prefix."""
    generator = torch.Generator().manual_seed(7)
    several = [torch.randint(2, 199, (n,), generator=generator).tolist() for n in (1, 3, 15, 16, 17, 33, 70)]
    return [*several, several[-1][:48] + several[4]]


def assert_computes_as_reference(folder: Path, model: Any, **options: Any) -> Engine:
    prompts = random_prompts()
    expected = [own_greedy(model, prompt, _NEW) for prompt in prompts]
    assert len(set(map(tuple, expected))) > 4
    params = SamplingParams(max_tokens=_NEW, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_memory": "8MB", "max_batch_tokens": 21}
    with Engine(folder, **(settings | options)) as engine:
        responses = engine.generate(prompts, params)
        assert [list(response.token_ids) for response in responses] == expected
        assert engine.stats.cached_tokens > 0
    return engine


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", TINY),
        ("qwen2", TINY),
        ("qwen3", TINY | {"head_dim": 32}),
        ("mistral", TINY | _WINDOW | _HEAD),
        ("mixtral", TINY | _WINDOW | {"num_local_experts": 4}),
        ("gemma", TINY | _HEAD),
        ("gemma2", TINY | _WINDOW | _HEAD | {"query_pre_attn_scalar": 16}),
        ("gemma3_text", TINY | _MIXED | _HEAD | {"query_pre_attn_scalar": 16}),
        ("phi", TINY),
        ("phi3", TINY | _WINDOW),
        ("phimoe", TINY | _WINDOW | {"num_local_experts": 4}),
        ("gpt2", _GPT2),
        ("gpt_neox", TINY),
        ("opt", _OPT),
        ("olmo", TINY),
        ("olmo2", TINY),
        ("olmo3", TINY | _MIXED),
        ("granite", TINY),
        ("cohere", TINY),
        ("cohere2", TINY | _MIXED),
        ("starcoder2", TINY | _WINDOW),
        ("smollm3", TINY),
        ("ministral", TINY | _MIXED | _HEAD),
        ("nemotron", TINY),
        ("glm", TINY | _HEAD),
        ("qwen2_moe", TINY | _EXPERTS | _MIXED | {"shared_expert_intermediate_size": 32, "use_sliding_window": True}),
        ("qwen3_moe", TINY | _EXPERTS | _HEAD),
        ("deepseek_v2", TINY | _MLA | {"v_head_dim": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_transformers_body(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    assert_computes_as_reference(tmp_path, tiny_model(tmp_path, model_type, **config), body="transformers")


_NINE_HEADS: dict[str, Any] = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("attention", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        pytest.param("llama", TINY, id="llama"),
        pytest.param("llama", TINY | {"num_key_value_heads": 4}, id="as-many-key-heads"),
        pytest.param("llama", TINY | {"num_key_value_heads": 1}, id="one-key-head"),
        pytest.param(
            "llama", TINY | {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}, id="9-heads-of-16"
        ),
        pytest.param("llama", TINY | {"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param("llama", TINY | {"tie_word_embeddings": True}, id="tied"),
        pytest.param("llama", TINY | {"hidden_size": 60, "intermediate_size": 90, "head_dim": 16}, id="odd-widths"),
        pytest.param("llama", TINY | {"rope_parameters": _LLAMA3}, id="llama3-rope"),
        pytest.param("llama", TINY | {"rope_parameters": _YARN}, id="yarn-rope"),
        pytest.param(
            "llama",
            TINY | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            id="linear-rope",
        ),
        pytest.param("qwen2", TINY, id="qwen2"),
        pytest.param("qwen2", TINY | _MIXED | {"use_sliding_window": True}, id="qwen2-some-layers-windowed"),
        pytest.param("qwen3", TINY | {"head_dim": 32}, id="qwen3"),
        pytest.param("qwen3", TINY | _HEAD | {"attention_bias": True}, id="qwen3-biases"),
        pytest.param("mistral", TINY | _WINDOW, id="mistral"),
        pytest.param("mistral", TINY | {"sliding_window": None}, id="mistral-without-window"),
    ],
)
def test_fused_body(
    tmp_path: Path, model_type: str, config: dict[str, Any], attention: str, native: NativeKernels | str
) -> None:
    model = tiny_model(tmp_path, model_type, **config)
    assert_computes_as_reference(tmp_path, model, body="fused", attention=attention)


@pytest.mark.parametrize("head_dim", [10, 20, 24])
@pytest.mark.parametrize("body", ["fused", "transformers"])
def test_head_sizes_that_the_kernels_refuse(tmp_path: Path, head_dim: int, body: str) -> None:
    model = tiny_model(tmp_path, "llama", **TINY | {"head_dim": head_dim})
    assert_computes_as_reference(tmp_path, model, body=body)
    with pytest.raises(UnsupportedModel, match=r"attention='native' is not possible.*attention='auto'"):
        Engine(tmp_path, dtype="float32", body=body, attention="native", kv_memory="1MB")


def test_the_fused_body_is_taken_for_the_llama_family_only(tmp_path: Path) -> None:
    tiny_model(tmp_path / "llama", "llama", **TINY)
    tiny_model(tmp_path / "olmo2", "olmo2", **TINY)
    with Engine(tmp_path / "llama", kv_memory="1MB") as engine:
        assert engine.core.body.name == "fused"
    with Engine(tmp_path / "olmo2", kv_memory="1MB") as engine:
        assert engine.core.body.name == "transformers"
    with pytest.raises(UnsupportedModel, match="olmo2"):
        Engine(tmp_path / "olmo2", body="fused", kv_memory="1MB")


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        ("bloom", {"vocab_size": 199, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "attention implementation"),
        ("mpt", {"vocab_size": 199, "d_model": 64, "n_layers": 2, "n_heads": 4}, "attention implementation"),
        ("falcon", TINY | {"alibi": True}, "attention implementation"),
        ("mamba", {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2}, "attention implementation"),
        ("rwkv", {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2}, "attention implementation"),
        ("recurrent_gemma", TINY | _HEAD | {"lru_width": 64, "num_hidden_layers": 3}, "a state of their own"),
        ("lfm2", TINY | {"layer_types": ["conv", "full_attention"]}, "a state of their own"),
        ("gpt_oss", TINY | _MIXED | _HEAD | {"num_local_experts": 4}, "sinks"),
        ("deepseek_v3", TINY | _MLA, "values of another size"),
        (
            "llama4_text",
            TINY | _HEAD | {"num_local_experts": 2, "attention_chunk_size": 16, "intermediate_size_mlp": 96},
            "masks its attention",
        ),
        ("bert", TINY, "masks its attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_right_is_refused(tmp_path: Path, model_type: str, config: dict[str, Any], reason: str) -> None:
    tiny_model(tmp_path, model_type, **config)
    with pytest.raises(UnsupportedModel, match=reason):
        Engine(tmp_path, dtype="float32", kv_memory="8MB")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=199, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="causal language model"):
        Engine(tmp_path, dtype="float32", kv_memory="8MB")


def test_rope_that_changes_with_the_longest_sequence_is_held_below_the_change(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
    }
    model = tiny_model(tmp_path, "phi3", **TINY | {"rope_parameters": rope, "original_max_position_embeddings": 128})
    assert_computes_as_reference(tmp_path, model)
    with pytest.raises(ValueError, match="128 tokens at most"):
        Engine(tmp_path, dtype="float32", max_model_len=200, kv_memory="8MB")
