"""Checkpoints with 8-bit or 4-bit weights in the compressed-tensors formats, for vLLM.

With 8 bits, each row of a layer's matrix has a scale, the greatest of its values over 127, as each row of activations
has when it is multiplied. With 4, each 64 weights of a row have one. Embedding and head stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_WEIGHTS = "model.safetensors"
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_GROUP = 64
"""Weights that share a scale: as many as divide both sizes of the built-in model's rows."""
_IN_A_WORD = 8
"""Numbers of 4 bits in one of 32."""


def quantized_checkpoint(source: Path, folder: Path, bits: int, say: Callable[[str], None]) -> Path:
    """The checkpoint in 8 or 4 `bits` of the model in the folder `source`, below `folder`.

    It is made once for each path and time of its weights. Raises ValueError if these are not in one safetensors file.
    """
    weights = source / _WEIGHTS
    if not weights.exists():
        raise ValueError(f"{source} has no {_WEIGHTS}: the weights of a quantized checkpoint are made of that file")
    made_of = hashlib.sha256(f"{source.resolve()} {weights.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder / f"{source.name}-{bits}-bits-{made_of}"
    if (target / "config.json").exists():
        return target
    say(f"writing {target.name}, once")
    target.mkdir(parents=True, exist_ok=True)
    save_file(_quantized(load_file(weights), bits), target / _WEIGHTS, metadata={"format": "pt"})
    for name in _COPIED:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # Written last: a checkpoint that has it is complete.
    stated = {**config, "quantization_config": _format(bits)}
    (target / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    return target


def _format(bits: int) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": "int", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"]}
    if bits == 8:
        group["weights"] = {**numbers, "strategy": "channel", "dynamic": False}
        group["input_activations"] = {**numbers, "strategy": "token", "dynamic": True}
    else:
        group["weights"] = {**numbers, "strategy": "group", "group_size": _GROUP}
        group["input_activations"] = None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _quantized(tensors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if not (".layers." in name and name.endswith("_proj.weight")):
            found[name] = tensor
            continue
        kinds = _in_8_bits(tensor) if bits == 8 else _in_4_bits(tensor)
        found |= {f"{name}{kind}": each for kind, each in kinds.items()}
    return found


def _in_8_bits(weights: Tensor) -> dict[str, Tensor]:
    values = weights.float()
    scales = _scales(values, 127)
    return {"": torch.round(values / scales).clamp(-127, 127).to(torch.int8), "_scale": scales.to(torch.bfloat16)}


def _in_4_bits(weights: Tensor) -> dict[str, Tensor]:
    """Numbers from 0 to 15 for -8 to 7, the first of eight in the lowest bits of a word.

    Raises ValueError for inputs that are not whole groups.
    """
    outputs, inputs = weights.shape
    if inputs % _GROUP:
        raise ValueError(f"{inputs} inputs of a weight are not divisible by {_GROUP}")
    values = weights.float().reshape(outputs, inputs // _GROUP, _GROUP)
    scales = _scales(values, 7)
    numbers = torch.round(values / scales).clamp(-8, 7).to(torch.int64) + 8
    places = torch.arange(_IN_A_WORD) * 4
    words = (numbers.reshape(outputs, -1, _IN_A_WORD) << places).sum(-1)
    return {
        "_packed": torch.where(words < 2**31, words, words - 2**32).to(torch.int32),
        "_scale": scales[..., 0].to(torch.bfloat16),
        "_shape": torch.tensor([outputs, inputs]),
    }


def _scales(values: Tensor, most: int) -> Tensor:
    """Return the scales by which the greatest value along the last dimension becomes `most`."""
    return (values.abs().amax(-1, keepdim=True).clamp(min=1e-8) / most).to(torch.bfloat16).float()
