"""A tokenizer for random models whose answers have a form."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer with a token for each byte, some words, and an end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token for token, letter in enumerate(letters)}
    merges = [("a", "g"), ("ag", "e"), ('"', ":"), ('"', ","), ("t", "r"), ("tr", "u"), ("tru", "e"), ("{", '"')]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    vocabulary["<end>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
