"""A checkpoint with the shape of Llama 3 8B and random weights, packed as compressed-tensors does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128256
QUERIES, KEYS = 32 * 128, 8 * 128
_GROUP = 128
SIZE = 0.02
"""About the standard deviation of a weight."""
LAYER_SHAPES = {
    "self_attn.q_proj": (QUERIES, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, QUERIES),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")


def random_checkpoint(folder: Path, bits: int, layers: int, tokenizer: Path) -> Path:
    """Return the folder of a checkpoint with `bits` and `layers`, made once below `folder`.

    Its tokenizer is the one in the folder `tokenizer`, which has fewer tokens than the model.
    """
    target = folder / f"llama-8b-{bits}-bits-{layers}-layers"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}

    def save(name: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, target / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    ends = {name: _values((VOCAB, HIDDEN), generator) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save("model-ends.safetensors", {**ends, "model.norm.weight": torch.ones(HIDDEN).bfloat16()})
    for layer in range(layers):
        at = f"model.layers.{layer}."
        tensors = {f"{at}{norm}.weight": torch.ones(HIDDEN).bfloat16() for norm in _NORMS}
        for name, shape in LAYER_SHAPES.items():
            tensors |= {f"{at}{name}.{kind}": each for kind, each in _packed(shape, bits, generator).items()}
        save(f"model-{layer:02}.safetensors", tensors)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, target / path.name)
    # Written last: a checkpoint that has it is complete.
    (target / "config.json").write_text(json.dumps(_config(bits, layers)))
    return target


def _values(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, SIZE, generator=generator)


def _packed(shape: tuple[int, int], bits: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return uniform numbers with one scale that gives them the standard deviation of weights."""
    outputs, inputs = shape
    words = torch.randint(-(2**31), 2**31, (outputs, inputs * bits // 32), generator=generator, dtype=torch.int32)
    scale = SIZE * 12**0.5 / 2**bits
    return {
        "weight_packed": words,
        "weight_scale": torch.full((outputs, inputs // _GROUP), scale).half(),
        "weight_shape": torch.tensor(shape),
    }


def _config(bits: int, layers: int) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }
