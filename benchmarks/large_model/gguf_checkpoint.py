"""The same shape with random weights as a GGUF file, for the peers that read no other format."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchwright.models.gguf_numbers import WEIGHTS
from benchmarks.large_model.checkpoint import HIDDEN, INTERMEDIATE, KEYS, LAYER_SHAPES, QUERIES, SIZE, VOCAB

KINDS = {4: "Q4_0", 8: "Q8_0"}
"""Names of the formats by their bits, with a scale for each 32 weights."""
_GROUP = 32
_HEAD_DIM = 128
_UNUSED = 5
"""Type of tokens that occur in no text."""

_Bytes = npt.NDArray[np.uint8]


def random_gguf(folder: Path, bits: int, layers: int, tokenizer: Path) -> Path:
    """Return a GGUF file with `bits` and `layers`, made once in `folder`.

    Embedding and head have 8 bits, as our head has. Its tokenizer is that of the GGUF file `tokenizer`, with as many
    more tokens as the model needs.
    """
    import gguf

    library: Any = gguf
    target = folder / f"llama-8b-{layers}-layers.{KINDS[bits]}.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        unfinished = Path(work) / target.name
        writer = library.GGUFWriter(unfinished, "llama")
        _write_sizes(library, writer, bits, layers)
        _write_tokenizer(library, library.GGUFReader(tokenizer), writer)
        for name, shape, kind in _tensors(bits, layers):
            size, number = _stored(library, shape, kind)
            writer.add_tensor_info(name, size, number, int(np.prod(size)) * number.itemsize, _raw(library, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        draw = np.random.default_rng(0)
        for _, shape, kind in _tensors(bits, layers):
            writer.write_tensor_data(np.ones(shape, np.float32) if kind == "F32" else _blocks(shape, kind, draw))
        writer.close()
        unfinished.replace(target)
    return target


def _tensors(bits: int, layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the name, the shape and the format of each tensor."""
    yield "token_embd.weight", (VOCAB, HIDDEN), KINDS[8]
    yield "output_norm.weight", (HIDDEN,), "F32"
    yield "output.weight", (VOCAB, HIDDEN), KINDS[8]
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{norm}.weight", (HIDDEN,), "F32"
        for name, shape in LAYER_SHAPES.items():
            yield f"blk.{layer}.{WEIGHTS[name]}.weight", shape, KINDS[bits]


def _stored(library: Any, shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if kind == "F32":
        return shape, np.dtype(np.float32)
    return library.quant_shape_to_byte_shape(shape, _raw(library, kind)), np.dtype(np.uint8)


def _raw(library: Any, kind: str) -> Any:
    return library.GGMLQuantizationType[kind]


def _blocks(shape: tuple[int, ...], kind: str, draw: np.random.Generator) -> _Bytes:
    """Return uniform numbers with one scale that gives them the standard deviation of weights."""
    outputs, inputs = shape
    bits = next(bits for bits, name in KINDS.items() if name == kind)
    scale = np.frombuffer(np.float16(SIZE * 12**0.5 / 2**bits).tobytes(), np.uint8)
    blocks = np.empty((outputs * inputs // _GROUP, 2 + _GROUP * bits // 8), np.uint8)
    blocks[:, :2] = scale
    blocks[:, 2:] = np.frombuffer(draw.bytes(blocks[:, 2:].size), np.uint8).reshape(len(blocks), -1)
    return blocks.reshape(outputs, -1)


def _write_sizes(library: Any, writer: Any, bits: int, layers: int) -> None:
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(QUERIES // _HEAD_DIM)
    writer.add_head_count_kv(KEYS // _HEAD_DIM)
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(library.LlamaFileType[f"MOSTLY_{KINDS[bits]}"])


def _write_tokenizer(library: Any, reader: Any, writer: Any) -> None:
    for field in reader.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        content, kind = field.contents(), field.types[0]
        if field.name == library.Keys.Tokenizer.LIST:
            content = [*content, *(f"<unused {number}>" for number in range(len(content), VOCAB))]
        elif field.name == library.Keys.Tokenizer.TOKEN_TYPE:
            content = [*content, *[_UNUSED] * (VOCAB - len(content))]
        of_elements = field.types[-1] if kind == library.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, content, kind, sub_type=of_elements)
