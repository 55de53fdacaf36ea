"""GGUF files for the peers that read nothing else: copies of one file in other precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.throughput.gguf_files import gguf_files
from benchmarks.throughput.systems import LLAMA_CPP, OPENVINO, Unavailable, gguf_systems

gguf: Any = pytest.importorskip("gguf")

MATRIX = np.random.default_rng(5).standard_normal((3, 64), dtype=np.float32)
VECTOR = np.arange(64, dtype=np.float32)
WORDS = ["<|end|>", "é", "Ġ"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    q8 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_file_type(7)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 1, 1])
    writer.add_tensor("output.weight", gguf.quants.quantize(MATRIX, q8), raw_dtype=q8)
    writer.add_tensor("output_norm.weight", VECTOR)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("precision", "file_type", "tolerance"), [("F16", 1, 1e-3), ("BF16", 32, 1e-2), ("Q4_0", 2, 0.5)]
)
def test_a_copy_has_other_weights_and_the_same_metadata(
    source: Path, tmp_path: Path, precision: str, file_type: int, tolerance: float
) -> None:
    said: list[str] = []
    path = gguf_files(str(source), [precision], tmp_path, said.append)[precision]
    reader = gguf.GGUFReader(path)
    matrix, vector = reader.tensors
    assert matrix.tensor_type.name == precision
    restored = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    original = gguf.GGUFReader(source).tensors[0]
    expected = gguf.quants.dequantize(original.data, original.tensor_type)
    np.testing.assert_allclose(restored, expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(vector.data, VECTOR)
    told = {key: reader.get_field(key).contents() for key in ("general.architecture", "llama.rope.freq_base")}
    assert told == {"general.architecture": "llama", "llama.rope.freq_base": 10000.0}
    assert reader.get_field("general.file_type").contents() == file_type
    assert reader.get_field("tokenizer.ggml.tokens").contents() == WORDS
    assert reader.get_field("tokenizer.ggml.token_type").contents() == [3, 1, 1]
    assert len(said) == 1
    assert gguf_files(str(source), [precision], tmp_path, said.append) == {precision: path}
    assert len(said) == 1


@pytest.mark.parametrize("model", ["minilm", "some/model", "missing.gguf", "."])
def test_a_model_that_does_not_come_as_gguf_has_no_files(model: str, tmp_path: Path) -> None:
    assert gguf_files(model, ["F16"], tmp_path, print) == {}


@pytest.mark.parametrize("name", [OPENVINO, LLAMA_CPP])
def test_a_peer_is_unavailable_without_its_environment_or_a_file(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=rf"setup_{name}\.sh"):
        gguf_systems(name, str(source), tmp_path, print, bits="bf16")
    for folder in ("openvino", "llama-cpp"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        (tmp_path / folder / "bin" / "python").touch()
    with pytest.raises(Unavailable, match="no GGUF file of minilm"):
        gguf_systems(name, "minilm", tmp_path, print, bits="bf16")
    expected = {
        OPENVINO: [("F16", ".F16"), ("int8", ".F16"), ("int4", ".F16")],
        LLAMA_CPP: [("BF16", ".BF16"), ("Q8_0", ".Q8_0"), ("Q4_0", ".Q4_0")],
    }
    found = []
    for bits in ("bf16", "int8", "int4"):
        (system,) = gguf_systems(name, str(source), tmp_path, print, bits=bits)
        assert system.model is not None
        found.append((system.precision, system.model.suffixes[0]))
    assert found == expected[name]
