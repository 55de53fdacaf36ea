"""The config of a Llama whose file says everything, without the class of its config.

That class comes from a module that imports half of torch: more than a second, longer than it takes to load a small
model. It adds defaults, which such a file does not need, and checks, which are made here. What is read is what
transformers' base class of all configs makes of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """The transformers config of the Llama in `folder`; None for anything that needs the config's own class."""
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
    """Rotary parameters that scale nothing, in today's form or as files had them before transformers 5."""
    rope = fields.get("rope_parameters")
    if rope is None and fields.get("rope_scaling") is None:
        rope = {"rope_type": "default", "rope_theta": fields.get("rope_theta")}
    if not isinstance(rope, dict) or rope.keys() != {"rope_type", "rope_theta"} or rope["rope_type"] != "default":
        return None
    return dict(rope) if type(rope["rope_theta"]) in (int, float) else None
