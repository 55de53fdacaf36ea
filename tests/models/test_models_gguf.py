"""GGUF files: converted once, exactly, and refused where the conversion would lose something."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from batchwright import Engine, SamplingParams
from batchwright.engine.bodies.packed_checkpoints import PackedFormat
from batchwright.engine.bodies.weights import Weights
from batchwright.engine_config import EngineConfig
from batchwright.errors import ModelCacheError, ModelNotFound, UnsupportedModel
from batchwright.inference.loading import load_engine, load_tokenizer
from batchwright.models import inventory, resolution, resolve
from batchwright.models.cache import Progress
from batchwright.models.conversion import Message

gguf = pytest.importorskip("gguf")
convert_gguf = pytest.importorskip("batchwright.models.convert_gguf")
torch = pytest.importorskip("torch")
pre_tokenizers = pytest.importorskip("tokenizers.pre_tokenizers")
transformers = pytest.importorskip("transformers")

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 32, 64, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """Every byte as byte-level BPE spells it, one merge, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<|im_start|>", "<|im_end|>", *alphabet, "ĠĠ"]


def random_model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(vocabulary()),
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
    )


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order in which GGUF stores the rows of a Llama query or key projection."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def tensors(model: Any) -> dict[str, np.ndarray]:
    """The model's weights under their GGUF names."""
    found = {"token_embd.weight": model.model.embed_tokens.weight, "output_norm.weight": model.model.norm.weight}
    for layer, block in enumerate(model.model.layers):
        for name, parameter in block.named_parameters():
            found[f"blk.{layer}.{NAMES[name.removesuffix('.weight')]}.weight"] = parameter
    arrays = {name: parameter.detach().numpy() for name, parameter in found.items()}
    for name, array in arrays.items():
        if "attn_q." in name or "attn_k." in name:
            arrays[name] = interleaved(array, HEADS if "attn_q." in name else KV_HEADS)
    return arrays


def write_gguf(
    path: Path,
    model: Any,
    *,
    file_type: int = 0,
    quantize: str = "",
    extra: Callable[[Any], None] = lambda _: None,
    leave_out: str = "",
) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_file_type(file_type)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = vocabulary()
    writer.add_token_list(words)
    writer.add_token_types([3, 3] + [1] * (len(words) - 2))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    extra(writer)
    for name, array in tensors(model).items():
        if name == leave_out:
            continue
        if quantize and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have this process convert, which has imported what takes seconds. The forms in which it did, as they come."""
    forms: list[str] = []

    def convert(source: Path, model: Path, work: Path, progress: Progress, *, as_numbers: bool) -> None:
        forms.append("numbers" if as_numbers else "values")
        written = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.TextIOWrapper(written)):
            # The converter caches in the library itself, and collects no garbage.
            for name in ("GGUFReader", "get_tensor_name_map"):
                patch.setattr(gguf, name, getattr(gguf, name))
            status = convert_gguf.main(source, model, forms[-1])
            said = [msgspec.json.decode(line, type=Message) for line in written.getvalue().splitlines()]
        gc.enable()
        if status:
            raise UnsupportedModel(said[-1].text)

    monkeypatch.setattr(resolution, "convert_gguf", convert)
    return forms


def test_unquantized_weights_tokenizer_and_template_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = random_model()
    source = write_gguf(tmp_path / "my model.gguf", original)
    lines: list[str] = []
    folder = resolve(str(source), progress=lines.append)
    assert lines[0] == "converting my model.gguf, once"
    assert capfd.readouterr() == ("", "")

    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert converted.dtype == torch.float32
    expected = original.state_dict()
    for name, value in converted.state_dict().items():
        assert torch.equal(value, expected[name]), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 64
    assert tokenizer.tokenize("a  12<|im_end|>") == ["a", "ĠĠ", "1", "2", "<|im_end|>"]
    assert tokenizer.chat_template == TEMPLATE

    monkeypatch.setattr(resolution, "convert_gguf", lambda *_: pytest.fail("converted again"))
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(source.read_bytes())
    assert resolve(str(source), pull=False) == resolve(str(copy)) == folder
    listed = inventory()[-1]
    assert (listed.name, listed.state, listed.path) == (str(source), "cached", folder)


def dequantized(weight: Any, kind: str) -> Any:
    which = gguf.GGMLQuantizationType[kind]
    array = weight.detach().numpy()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, which), which))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_weights_stay_numbers(tmp_path: Path, kind: str) -> None:
    original = random_model()
    source = write_gguf(tmp_path / "m.gguf", original, file_type=7, quantize=kind)
    folder = resolve(str(source))
    assert folder != resolve(str(source), weights="values")
    bits = 8 if kind == "Q8_0" else 4
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "batchwright", "bits": bits}
    packed = PackedFormat.of(config["quantization_config"])
    assert isinstance(packed, PackedFormat)
    weights = Weights(folder, torch.float32, torch.device("cpu"), packed)
    for layer, block in enumerate(original.model.layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"):
            original_weight = block.get_submodule(name).weight
            numbers = weights.numbers(f"model.layers.{layer}.{name}.weight", (*original_weight.shape,))
            assert numbers is not None
            assert numbers.bits == bits
            taken = weights.take(f"model.layers.{layer}.{name}.weight")
            assert torch.equal(taken, numbers.values)
            assert torch.equal(taken, dequantized(original_weight, kind))


@pytest.mark.usefixtures("in_process", "with_kernels")
def test_a_model_of_numbers_is_computed_as_it_is(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_model(), file_type=7, quantize="Q8_0")
    prompt = [*range(40)]
    found = {}
    for body in ("fused", "transformers"):
        with Engine(source, body=body, dtype="float32", device="cpu", kv_memory="1MB") as engine:
            (response,) = engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            found[body] = response.token_ids
    assert found["fused"] == found["transformers"]
    folder = resolve(str(source))
    with pytest.raises(UnsupportedModel, match=r"give the \.gguf file with body='transformers'"):
        Engine(folder, body="transformers", device="cpu")


@pytest.mark.usefixtures("with_kernels")
def test_a_model_is_converted_once_to_the_form_that_its_engine_reads(tmp_path: Path, in_process: list[str]) -> None:
    source = str(write_gguf(tmp_path / "m.gguf", random_model(), file_type=7, quantize="Q8_0"))
    config = EngineConfig(dtype="float32", device="cpu", kv_memory="1MB")
    load_engine(source, config).close()
    assert load_tokenizer(source, config).encode("a")
    assert in_process == ["values"]
    assert resolve(source, pull=False, weights="either") == resolve(source, pull=False, weights="values")
    load_engine(source, EngineConfig(body="fused", device="cpu", kv_memory="1MB")).close()
    assert in_process == ["values", "numbers"]
    assert resolve(source, pull=False, weights="either") == resolve(source, pull=False)


@pytest.mark.parametrize(
    ("options", "on_cpu", "form"),
    [
        ({}, True, "numbers"),
        ({}, False, "values"),
        ({"body": "fused", "dtype": "bfloat16"}, True, "numbers"),
        ({"dtype": "float32"}, True, "values"),
        ({"body": "transformers"}, True, "values"),
        ({"quantization": "int8"}, True, "values"),
        ({"tensor_parallel": 2}, True, "values"),
    ],
)
def test_which_form_of_weights_engines_read(options: dict[str, Any], on_cpu: bool, form: str) -> None:
    assert EngineConfig(**options).weights_form(on_cpu=on_cpu) == form


def test_a_disk_too_small_for_the_values_is_seen_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_root: Path
) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_model(), file_type=7, quantize="Q8_0")
    usage = shutil.disk_usage("/")._replace(free=source.stat().st_size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    said: list[str] = []
    with pytest.raises(ModelCacheError, match=r"MB are needed; free some space"):
        resolve(str(source), progress=said.append)
    assert "converting the weights" not in said
    assert not list((cache_root / "tmp").iterdir())


@pytest.mark.usefixtures("with_kernels")
def test_numbers_can_be_rounded_once_more(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_model(), file_type=7, quantize="Q4_0")
    with Engine(source, quantization="int8", device="cpu", kv_memory="1MB") as engine:
        (response,) = engine.generate([[*range(40)]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
        assert len(response.token_ids) == 4
        assert "int8 weights and activations" in engine.stats.implementation
        assert "groups" not in engine.stats.implementation
    with pytest.raises(UnsupportedModel, match="have 4 bits already"):
        Engine(resolve(str(source)), quantization="int8-group", device="cpu")


def test_quantized_weights_become_bfloat16_where_transformers_reads_them(tmp_path: Path) -> None:
    original = random_model()
    source = write_gguf(tmp_path / "q8.gguf", original, file_type=7, quantize="Q8_0")
    folder = resolve(str(source), weights="values")
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert converted.dtype == torch.bfloat16
    exact = dequantized(original.model.layers[1].mlp.down_proj.weight, "Q8_0")
    assert torch.equal(converted.model.layers[1].mlp.down_proj.weight, exact.to(torch.bfloat16))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("extra", "leave_out", "reason"),
    [
        (lambda w: w.add_uint16("split.count", 3), "", "one of 3 parts of a split file"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "", "rotary embedding is rescaled"),
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "", r"rescaled \(yarn\)"),
        (lambda _: None, "blk.1.ffn_up.weight", "lacks 1 of the model's tensors"),
        (lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "", "1 biases, blk.0.attn_q.bias among"),
    ],
)
def test_what_the_conversion_would_lose_is_refused(
    tmp_path: Path, cache_root: Path, extra: Callable[[Any], None], leave_out: str, reason: str
) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_model(), extra=extra, leave_out=leave_out)
    with pytest.raises(UnsupportedModel, match=reason):
        resolve(str(source))
    assert not list((cache_root / "tmp").iterdir())
    assert not (cache_root / "models").exists()


def test_an_architecture_nobody_knows(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "abacus")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="abacus"):
        resolve(str(tmp_path / "m.gguf"))


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(UnsupportedModel, match="is not a GGUF file"):
        resolve(str(tmp_path / "m.gguf"))


def test_without_pull_nothing_is_converted(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_model())
    with pytest.raises(ModelNotFound, match="not in the cache"):
        resolve(str(source), pull=False)


def test_a_changed_file_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(source: Path, model: Path, work: Path, progress: Any, *, as_numbers: bool) -> None:
        (model / "config.json").write_bytes(source.read_bytes())

    monkeypatch.setattr(resolution, "convert_gguf", pretend)
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF one")
    first = resolve(str(source))
    source.write_bytes(b"GGUF three")
    second = resolve(str(source))
    assert first != second
    assert (second / "config.json").read_bytes() == b"GGUF three"
    os.utime(source, ns=(1, 1))
    assert resolve(str(source)) == second


def test_a_converter_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_root: Path) -> None:
    killer = tmp_path / "python"
    killer.write_text("#!/bin/sh\nkill -9 $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killer))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelCacheError, match=f"ended by signal {signal.SIGKILL:d}"):
        resolve(str(tmp_path / "m.gguf"))
    assert not list((cache_root / "tmp").iterdir())


def test_the_converter_does_not_outlive_its_parent(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", random_model())
    command = [sys.executable, "-m", "batchwright.models.convert_gguf", str(source), str(tmp_path / "out")]
    command.append("values")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == 1
    assert not (tmp_path / "out").exists()
