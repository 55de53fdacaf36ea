"""The choice of a model's body, precision and device, and the reading of its config.

A Llama whose config file is complete is loaded without the class of its config, whose module imports half of torch:
that takes more than a second, longer than loading a small model. The class adds defaults, which such a file does not
need, and checks, which are made here instead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.linear import FP8_CAPABILITY, FP8_MULTIPLE, fp8_disagreement
from batchwright.engine.bodies.llama import (
    GROUPED,
    LlamaBody,
    compiles_here,
    uneven,
    unsuitable,
    why_not_in_groups,
)
from batchwright.engine.bodies.packed_checkpoints import PackedFormat
from batchwright.engine.bodies.shard import Shard
from batchwright.engine.bodies.transformers_body import TransformersBody
from batchwright.engine.bodies.weights import Weights, has_safetensors
from batchwright.engine_config import EngineConfig, QuantizationName
from batchwright.errors import UnsupportedModel

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_body(folder: Path, config: EngineConfig) -> ModelBody:
    """Load the model in `folder` (transformers format).

    `body="auto"` uses the fused body for the Llama family, the only one with `quantization`. `dtype="auto"` is as in
    `choose_dtype`, or bfloat16 if the layers are compiled for it, which needs native attention. Raises ValueError for a
    device that does not exist or does not support this, `UnsupportedModel` for a model that cannot be run correctly.
    """
    where = choose_device(config.device)
    kind = choose_dtype(config.dtype, where)
    plain = plain_llama_config(folder)
    architecture = read_config(folder) if plain is None else plain
    reason = _why_not_fused(architecture, folder)
    if config.body == "fused" and reason is not None:
        raise UnsupportedModel(f"the fused body cannot run this model: {reason}. Use body='auto'.")
    if config.body == "transformers" or reason is not None:
        if config.quantization is not None:
            why = reason or "body='transformers' was asked for"
            raise UnsupportedModel(
                f"quantization={config.quantization!r} needs the fused body, which cannot be used: {why}"
            )
        _require_values(architecture, reason)
        return TransformersBody(folder, architecture if plain is None else read_config(folder), kind, where)
    if config.quantization == "fp8":
        _require_fp8(architecture, kind, where)
    native = config.attention in ("auto", "native")
    if config.dtype == "auto" and where.type == "cpu" and native and compiles_here(architecture):
        kind = torch.bfloat16
    packed = _packed_format(architecture)
    grouped_kind = torch.bfloat16 if config.dtype == "auto" else kind
    reason = why_not_in_groups(architecture, grouped_kind, where, config.attention)
    quantization = config.quantization if packed is None else _of_packed(packed, config.quantization, reason)
    if quantization in GROUPED:
        if reason is not None:
            raise UnsupportedModel(f"quantization={quantization!r} cannot be used: {reason}. Leave it out")
        kind = grouped_kind
    weights = Weights(folder, kind, where, packed)
    return LlamaBody(architecture, weights, kind, where, quantization=quantization, longest=config.max_model_len)


def _require_values(architecture: Any, reason: str | None) -> None:
    """Raise `UnsupportedModel` for the weights of a GGUF file that were kept as numbers."""
    packed = _packed_format(architecture)
    if packed is not None and packed.method == "batchwright":
        raise UnsupportedModel(
            "transformers cannot read the numbers of a GGUF file, and the fused body cannot run the model: "
            f"{reason or 'it was not asked for'}; give the .gguf file with body='transformers', or the model in "
            "transformers format"
        )


def _packed_format(architecture: Any) -> PackedFormat | None:
    fields = getattr(architecture, "quantization_config", None)
    found = None if fields is None else PackedFormat.of(fields)
    return None if isinstance(found, str) else found


def _of_packed(packed: PackedFormat, asked: QuantizationName | None, reason: str | None) -> QuantizationName | None:
    """Return how weights packed in this format are multiplied: in groups, or as values if there is a `reason` for it.

    Weights of a GGUF file can be rounded once more. Raises `UnsupportedModel` if another quantization was asked for.
    """
    if packed.method == "batchwright" and asked in ("int8", "fp8"):
        return asked
    own: QuantizationName = "int4" if packed.bits == 4 else "int8-group"
    if asked not in (None, own):
        raise UnsupportedModel(
            f"quantization={asked!r}: the checkpoint's weights have {packed.bits} bits already. Leave it out"
        )
    if reason is not None and asked is None:
        _log.info("the weights, of %d bits, are multiplied as values: %s", packed.bits, reason)
        return None
    return own


def _require_fp8(architecture: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless products in 8-bit floating point run on `device` for this model, with results in `dtype`."""
    remedy = "use quantization='int8', or leave it out"
    least = ".".join(map(str, FP8_CAPABILITY))
    if device.type != "cuda":
        raise ValueError(f"quantization='fp8' on {device}: needs CUDA, compute capability {least} or higher; {remedy}")
    if (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise ValueError(
            f"quantization='fp8' on {device}: needs compute capability {least} or higher, not "
            f"{capability[0]}.{capability[1]}; {remedy}"
        )
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"dtype={name!r} with quantization='fp8': products come out in bfloat16; use dtype='bfloat16'")
    if (reason := uneven(architecture, FP8_MULTIPLE)) is not None:
        raise UnsupportedModel(f"quantization='fp8' needs sizes divisible by {FP8_MULTIPLE}, but {reason}; {remedy}")
    if (reason := fp8_disagreement(device)) is not None:
        raise UnsupportedModel(f"quantization='fp8' cannot be used on {device}: {reason}; {remedy}")


def load_shard(folder: Path, config: EngineConfig, shard: Shard) -> LlamaBody:
    """Load `shard`'s part of the model in `folder`, and read no other part. Raises the errors of `load_body`."""
    where = choose_device(config.device)
    kind = choose_dtype(config.dtype, where)
    architecture = plain_llama_config(folder) or read_config(folder)
    if (reason := _why_not_fused(architecture, folder)) is not None:
        raise UnsupportedModel(
            f"tensor_parallel={shard.ranks} needs the fused body, which cannot run this model: {reason}"
        )
    weights = Weights(folder, kind, where, _packed_format(architecture))
    return LlamaBody(architecture, weights, kind, where, shard=shard, longest=config.max_model_len)


def _why_not_fused(architecture: Any, folder: Path) -> str | None:
    return unsuitable(architecture) or (None if has_safetensors(folder) else f"{folder} has no *.safetensors")


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is CUDA if available, else the CPU. Raises ValueError for other names."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: torch finds no CUDA device here; use device='cpu'")
    if device.index is not None and device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype called `name`; "auto" is bfloat16 if the hardware multiplies it, else float32."""
    if name == "auto":
        checks = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
        on_cpu = any(check is not None and check() for check in checks)
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else on_cpu
        return torch.bfloat16 if fast else torch.float32
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype={name!r}: must be auto, {', '.join(_DTYPES)}") from None


def read_config(folder: Path) -> Any:
    """Return the transformers config of a model's folder. Raises `UnsupportedModel`."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"transformers cannot read the config of {folder}: {error}") from error


_WHOLE_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_NOT_PLAIN = frozenset({"auto_map", "quantization_config", "partial_rotary_factor", "per_layer_config"})


def plain_llama_config(folder: Path) -> Any:
    """Return the transformers config of the Llama in `folder`; None for a model that needs the config's own class."""
    try:
        fields = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    rope = _plain_rope(fields) if isinstance(fields, dict) else None
    if rope is None or not _says_everything(fields):
        return None
    from transformers import PreTrainedConfig

    known = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    return PreTrainedConfig(**known | {"rope_parameters": rope})


def _says_everything(fields: Mapping[str, Any]) -> bool:
    return (
        fields.get("model_type") == "llama"
        and all(type(fields.get(name)) is int and fields[name] > 0 for name in _WHOLE_NUMBERS)
        and fields["hidden_size"] % fields["num_attention_heads"] == 0
        and type(fields.get("head_dim")) in (int, type(None))
        and fields.get("hidden_act") == "silu"
        and type(fields.get("rms_norm_eps")) is float
        and type(fields.get("tie_word_embeddings")) is bool
        and not _NOT_PLAIN & fields.keys()
    )


def _plain_rope(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return rotary parameters without scaling, in the current form or that before transformers 5, or None."""
    rope = fields.get("rope_parameters")
    if rope is None and fields.get("rope_scaling") is None:
        rope = {"rope_type": "default", "rope_theta": fields.get("rope_theta")}
    if not isinstance(rope, dict) or rope.keys() != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
        return None
    return dict(rope) if type(rope["rope_theta"]) in (int, float) else None
