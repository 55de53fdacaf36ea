"""What is read without the class of a model's config says the same as that class."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from batchwright import Engine
from batchwright.engine.bodies import load_body
from batchwright.engine.bodies.body import LEAST_POSITIONS
from batchwright.engine.bodies.linear import can_pack
from batchwright.engine.bodies.llama import LlamaBody, unsuitable
from batchwright.engine.bodies.load import load_shard, plain_llama_config, read_config
from batchwright.engine.bodies.shard import Shard
from batchwright.engine.bodies.weights import Weights
from batchwright.engine.tokenizer import Tokenizer
from batchwright.engine_config import EngineConfig, QuantizationName
from batchwright.errors import UnsupportedModel

from .support import TINY, tiny_model

LLAMA: dict[str, Any] = TINY | {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act"),
)
"""Of a Llama's config, by the fused body; rotary parameters and the size of a head are compared apart."""


def write(folder: Path, **fields: Any) -> None:
    """The file that transformers writes for a small Llama, with `fields` instead; None leaves one out."""
    from transformers import LlamaConfig

    LlamaConfig(**LLAMA).save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in written.items() if value is not None}))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"head_dim": None},
        {"head_dim": 32},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": None, "rope_theta": 1e5},
        {"torch_dtype": "bfloat16", "dtype": None, "eos_token_id": [1, 2]},
    ],
)
def test_a_file_that_says_everything(tmp_path: Path, fields: dict[str, Any]) -> None:
    write(tmp_path, **fields)
    plain, whole = plain_llama_config(tmp_path), read_config(tmp_path)
    assert plain is not None
    assert [getattr(plain, name) for name in READ] == [getattr(whole, name) for name in READ]
    assert plain.rope_parameters == whole.rope_parameters
    assert (getattr(plain, "head_dim", None) or 16) == whole.head_dim
    assert unsuitable(plain) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen2"},
        {"tie_word_embeddings": None},
        {"num_key_value_heads": None},
        {"vocab_size": "199"},
        {"hidden_size": 65},
        {"num_hidden_layers": 0},
        {"hidden_act": "gelu"},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_a_file_that_leaves_something_to_its_class(tmp_path: Path, fields: dict[str, Any]) -> None:
    write(tmp_path, **fields)
    assert plain_llama_config(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": TINY["intermediate_size"] // 2},
        {"hidden_size": TINY["hidden_size"] // 2},
        {"vocab_size": TINY["vocab_size"] + 8},
        {"vocab_size": TINY["vocab_size"] - 8},
        {"num_key_value_heads": TINY["num_attention_heads"]},
        {"head_dim": 8},
    ],
)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_of_other_shapes_than_the_config_says(
    tmp_path: Path, change: dict[str, int], quantization: QuantizationName | None
) -> None:
    tiny_model(tmp_path, "llama", **TINY)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnsupportedModel, match=r"has a tensor '.*' of shape \[.*\], where its config.json says \["):
        Engine(tmp_path, body="fused", quantization=quantization, kv_memory="1MB")


def test_heads_that_cannot_be_shared_evenly_are_refused(tmp_path: Path) -> None:
    write(tmp_path, num_attention_heads=4, num_key_value_heads=3)
    config = read_config(tmp_path)
    assert "not divisible by num_key_value_heads 3" in str(unsuitable(config))
    config.num_key_value_heads = 0
    assert "not divisible by num_key_value_heads 0" in str(unsuitable(config))


def test_a_file_that_is_damaged_or_missing(tmp_path: Path) -> None:
    assert plain_llama_config(tmp_path) is None
    for content in ("{", "[]", "{}"):
        (tmp_path / "config.json").write_text(content)
        assert plain_llama_config(tmp_path) is None


@pytest.mark.parametrize(
    ("tokenizer_class", "model_type"),
    [
        ("TokenizersBackend", "llama"),
        ("PreTrainedTokenizerFast", "llama"),
        ("LlamaTokenizerFast", "llama"),
        ("GPT2Tokenizer", "llama"),
        ("Qwen2Tokenizer", "qwen2"),
        (None, "llama"),
    ],
)
def test_the_tokenizer_is_the_one_that_transformers_chooses(
    smollm2_path: Path, tmp_path: Path, tokenizer_class: str | None, model_type: str
) -> None:
    from transformers import AutoTokenizer

    write(tmp_path, model_type=model_type)
    (tmp_path / "tokenizer.json").symlink_to(smollm2_path / "tokenizer.json")
    named = json.loads((smollm2_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    told = {name: value for name, value in named.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(tmp_path, 49152)
    assert type(ours._inner) is type(theirs)
    assert ours.encode("Grüße, 世界!\n  def f(x):") == theirs("Grüße, 世界!\n  def f(x):")["input_ids"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch for CUDA imports some of them itself")
def test_the_default_model_starts_without_the_slow_modules(smollm2_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from batchwright.engine.bodies import load_body
from batchwright.engine_config import EngineConfig
from batchwright.engine.tokenizer import Tokenizer
body = load_body(Path({str(smollm2_path)!r}), EngineConfig(device="cpu"))
Tokenizer(Path({str(smollm2_path)!r}), body.vocab_size)
print(*(name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_tokenizer_of_the_default_model_needs_no_torch(smollm2_path: Path) -> None:
    script = f"""
import sys
from batchwright.engine_config import EngineConfig
from batchwright.inference.loading import load_tokenizer
assert load_tokenizer({str(smollm2_path)!r}, EngineConfig()).encode("one two")
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_tensor_that_only_the_index_knows(tmp_path: Path) -> None:
    save_file({"here": torch.ones(2)}, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(("here", "gone"), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = Weights(tmp_path, torch.float32, torch.device("cpu"))
    assert weights.take("here").tolist() == [1, 1]
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors has no tensor 'gone'"):
        weights.take("gone")


@pytest.mark.parametrize(("longest", "rows"), [(None, 5000), (2000, 2000), (100, LEAST_POSITIONS)])
def test_a_rope_table_is_as_long_as_sequences_can_be(tmp_path: Path, longest: int | None, rows: int) -> None:
    tiny_model(tmp_path, "llama", **TINY | {"max_position_embeddings": 5000})
    config = EngineConfig(body="fused", device="cpu", max_model_len=longest)
    for body in (load_body(tmp_path, config), load_shard(tmp_path, config, Shard(0, 2))):
        assert isinstance(body, LlamaBody)
        assert len(body._weights.rope.cosines) == rows
        assert body.max_model_len == 5000


@pytest.mark.skipif(not can_pack(torch.float32), reason="torch packs no weights here")
def test_a_head_that_is_packed_is_not_held_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path, "llama", **TINY | {"tie_word_embeddings": False})
    heads = []
    genuine = Weights.take

    def noted(self: Weights, name: str, *args: Any, **more: Any) -> torch.Tensor:
        found = genuine(self, name, *args, **more)
        if name == "lm_head.weight":
            heads.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Weights, "take", noted)
    body = load_body(tmp_path, EngineConfig(body="fused", device="cpu", dtype="float32"))
    body.allocate(20, 16, "sdpa")
    assert [head() for head in heads] == [None]
