"""Tokenizers that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import InvalidRequest, UnsupportedModel
from batchwright.wire.chats import Chat


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


def test_a_model_with_several_templates_and_none_for_chats_still_loads(smollm2_path: Path, tmp_path: Path) -> None:
    for path in smollm2_path.iterdir():
        if path.suffix not in (".safetensors", ".jinja"):
            shutil.copy(path, tmp_path / path.name)
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}<tool_call>")
    tokenizer = Tokenizer(tmp_path, 49152)
    assert tokenizer.encode("Hello")
    with pytest.raises(InvalidRequest, match="template"):
        tokenizer.encode([{"role": "user", "content": "Hello"}])
    assert tokenizer.encode(Chat([{"role": "user", "content": "Hello"}], tools=({"type": "function"},)))
