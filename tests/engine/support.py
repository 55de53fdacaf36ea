"""What several test modules need: greedy references, and tiny models saved to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NEW_TOKENS = 20

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A config that most decoder-only architectures take."""


def slices(ids: list[int], lengths: list[int]) -> list[list[int]]:
    """A slice of `ids`, read round and round, for each length; each begins where the one before ended."""
    found, at = [], 0
    for length in lengths:
        found.append([ids[(at + i) % len(ids)] for i in range(length)])
        at += length
    return found


def own_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """What `generate` of transformers adds to `prompt`, up to `new_tokens` tokens, end-of-text ignored."""
    ids = torch.tensor([prompt], device=model.device)
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def tiny_model(folder: Path, model_type: str, **config: Any) -> Any:
    """A random model of the architecture, saved to `folder`, with weights large enough that outputs vary."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(CONFIG_MAPPING[model_type](**config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:  # biases and norms: near what they were, yet not zero or one
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model
