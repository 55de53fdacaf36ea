"""The program that converts a GGUF file: `python -m batchwright.models.convert_gguf FILE.gguf FOLDER FORM`.

FORM is `numbers` or `values`, as `batchwright.models.conversion` explains.

`batchwright.models.conversion` runs it as a child process. It writes one JSON `Message` per line to stdout, and exits
as soon as its stdin closes, so that it never outlives its parent.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from batchwright.models.conversion import Message
from batchwright.models.gguf_numbers import ARCHITECTURES, WEIGHTS, Numbers, Stored, bytes_needed, numbers_of

_FLOAT32_FILE, _FLOAT16_FILE = 0, 1
"""Values of `general.file_type` for files that are not quantized."""
_WITHOUT_BIASES = frozenset({"llama", "qwen3"})
"""Architectures whose biases transformers ignores: its configs say that there are none."""

_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of `tokenizer.ggml.pre` for which every digit is split off before GPT-2's pattern is applied.

transformers (5.23) does not know these names and would apply the pattern alone, which tokenizes the spaces before a
number differently from how the model was trained."""


class Unsupported(Exception):
    """The file cannot be converted to a model that computes correctly."""


def main(source: Path, folder: Path, form: str) -> int:
    """Convert `source` into `folder`. Returns the exit status: 0 if everything was written."""
    from safetensors import SafetensorError

    try:
        _convert(source, folder, as_numbers=form == "numbers")
        return 0
    except (OSError, SafetensorError) as error:
        # transformers also raises OSError, without an errno, for files that it does not understand.
        writing = isinstance(error, SafetensorError) or error.errno is not None
        _say(str(error), "write" if writing else "unsupported")
    except Unsupported as error:
        _say(str(error), "unsupported")
    except Exception as error:
        _say(f"{type(error).__name__}: {error}", "unsupported")
    return 1


def _convert(source: Path, folder: Path, *, as_numbers: bool) -> None:
    import gguf

    # Reading a GGUF file makes hundreds of thousands of small live objects: no cycles, but much to scan.
    gc.disable()
    # transformers reads the file three times, and builds the table of names once per module. Both depend only on their
    # arguments, so they are cached in this process.
    library: Any = gguf
    library.GGUFReader = functools.cache(gguf.GGUFReader)
    library.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)

    reader = library.GGUFReader(str(source))
    _require_lossless(reader)
    file_type = _scalar(reader, "general.file_type")
    dtype = {_FLOAT32_FILE: torch.float32, _FLOAT16_FILE: torch.float16}.get(file_type, torch.bfloat16)
    as_numbers = as_numbers and _scalar(reader, "general.architecture") in ARCHITECTURES
    stored = [Stored(each.name, each.tensor_type.name, int(each.n_elements)) for each in reader.tensors]
    _say("", "room", bytes_needed(stored, dtype.itemsize, as_numbers=as_numbers))
    _say("converting the weights")
    context = _save_model(source, folder, dtype)
    if as_numbers:
        _keep_numbers(reader, folder)
    _say("converting the tokenizer")
    _save_tokenizer(source, folder, str(_scalar(reader, "tokenizer.ggml.pre")), context)


def _require_lossless(reader: Any) -> None:
    """Raise `Unsupported` for a file from which transformers would silently drop something that matters."""
    parts = _scalar(reader, "split.count")
    if parts is not None and int(parts) > 1:
        raise Unsupported(f"it is one of {parts} parts of a split file; merge them first (gguf-split --merge)")
    architecture = _scalar(reader, "general.architecture")
    biases = [tensor.name for tensor in reader.tensors if tensor.name.endswith(".bias")]
    if biases and architecture in _WITHOUT_BIASES:
        raise Unsupported(
            f"it has {len(biases)} biases, {biases[0]} among them, which the conversion would lose; use the same model"
            " in transformers format (safetensors)"
        )
    scaling = _scalar(reader, f"{architecture}.rope.scaling.type")
    factors = [tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    if factors or (scaling not in (None, "none") and architecture != "gpt-oss"):
        raise Unsupported(
            f"its rotary embedding is rescaled ({', '.join(factors) or scaling}), which the conversion would"
            " lose; use the same model in transformers format (safetensors)"
        )


def _save_model(source: Path, folder: Path, dtype: torch.dtype) -> int | None:
    """Write weights and configuration. Returns the longest context in tokens; None if the model has no limit."""
    from transformers import AutoModelForCausalLM, GgufConfig

    loader: Any = AutoModelForCausalLM
    model, info = loader.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise Unsupported(f"it lacks {len(missing)} of the model's tensors, {missing[0]} among them")
    model.save_pretrained(folder)
    return getattr(model.config, "max_position_embeddings", None)


def _keep_numbers(reader: Any, folder: Path) -> None:
    """Replace the stored values of layers' weights by their numbers."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    places: dict[str, str] = {}
    bits: list[int] = []
    for path in sorted(folder.glob("*.safetensors")):
        kept: dict[str, Any] = {}
        for name, values in load_file(path).items():
            found = _numbers(stored, name, values, heads)
            if found is None:
                kept[name] = values
                continue
            bits.append(found.bits)
            base = name.removesuffix("weight")
            kept |= {f"{base}weight_{kind}": torch.from_numpy(each) for kind, each in found.tensors().items()}
        places |= dict.fromkeys(kept, path.name)
        unfinished = path.with_suffix(".unfinished")
        save_file({name: each.contiguous() for name, each in kept.items()}, unfinished, metadata={"format": "pt"})
        unfinished.replace(path)
    if not bits:
        return
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    quantization = {"quant_method": "batchwright", "bits": min(bits)}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}), encoding="utf-8")


def _numbers(stored: Mapping[str, Any], name: str, values: torch.Tensor, heads: Mapping[str, int]) -> Numbers | None:
    """Return the numbers of a weight; None if it is kept as values."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    theirs = None if found is None else WEIGHTS.get(found[2])
    tensor = None if found is None else stored.get(f"blk.{found[1]}.{theirs}.weight")
    if tensor is None or theirs is None:
        return None
    return numbers_of(tensor.data, tensor.tensor_type.name, values.float().numpy(), heads.get(theirs))


def _save_tokenizer(source: Path, folder: Path, pre: str, context: int | None) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if pre in _DIGIT_SPLITTING:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if context is not None:
        tokenizer.model_max_length = context  # a GGUF file does not state it, and the default is no limit
    tokenizer.save_pretrained(folder)


def _scalar(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _say(text: str, kind: str = "progress", needs_bytes: int = 0) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(Message(" ".join(text.split()), kind, needs_bytes)) + b"\n")
    sys.stdout.buffer.flush()


def _exit_with_parent() -> None:
    # os.read, not sys.stdin: a thread blocked in a buffered read would hold its lock at shutdown.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
