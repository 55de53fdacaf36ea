"""A random model with a token for each byte, which generates anything that it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WORDS = [("a", "g"), ("ag", "e"), ('"', ":"), ('"', ","), ("t", "r"), ("tr", "u"), ("tru", "e"), ("{", '"')]


def write_tiny(folder: Path) -> None:
    """Save a tokenizer with a token for each byte and some words, and a model of two layers with random weights."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token for token, letter in enumerate(letters)}
    for left, right in _WORDS:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, _WORDS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    make: Any = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
