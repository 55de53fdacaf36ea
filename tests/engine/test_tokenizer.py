"""Tokenizers that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import UnsupportedModel


def test_a_damaged_or_missing_tokenizer_is_named(smollm2_path: Path, tmp_path: Path) -> None:
    for path in smollm2_path.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, tmp_path / path.name)
    assert Tokenizer(tmp_path, 49152).encode("Hello")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:1000])
    with pytest.raises(UnsupportedModel, match=r"its tokenizer.*damaged.*copy or fetch the model again"):
        Tokenizer(tmp_path, 49152)
    tokenizer.unlink()
    with pytest.raises(UnsupportedModel, match="its tokenizer"):
        Tokenizer(tmp_path, 49152)
