"""A checkpoint with 8-bit weights and activations in the format of compressed-tensors, for vLLM.

Each row of a layer's matrix has a scale, the greatest of its values over 127, as each row of activations has when it is
multiplied. Embedding and head stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_WEIGHTS = "model.safetensors"
_COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True}
_FORMAT = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}


def w8a8_checkpoint(source: Path, folder: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint of the model in the folder `source`, made in `folder` once for each path and time of its weights.

    Raises ValueError if the weights are not in one safetensors file.
    """
    weights = source / _WEIGHTS
    if not weights.exists():
        raise ValueError(f"{source} has no {_WEIGHTS}: the weights of a W8A8 checkpoint are made of that file")
    made_of = hashlib.sha256(f"{source.resolve()} {weights.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder / f"{source.name}-{made_of}"
    if (target / "config.json").exists():
        return target
    say(f"writing {target.name}, once")
    target.mkdir(parents=True, exist_ok=True)
    save_file(_quantized(load_file(weights)), target / _WEIGHTS, metadata={"format": "pt"})
    for name in _COPIED:
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    # Last: a checkpoint that has it is whole.
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": _FORMAT}), encoding="utf-8")
    return target


def _quantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if not (".layers." in name and name.endswith("_proj.weight")):
            found[name] = tensor
            continue
        values = tensor.float()
        scales = (values.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127).to(torch.bfloat16).float()
        found[name] = torch.round(values / scales).clamp(-127, 127).to(torch.int8)
        found[name.removesuffix("weight") + "weight_scale"] = scales.to(torch.bfloat16)
    return found
