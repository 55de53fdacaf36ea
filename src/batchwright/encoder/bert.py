"""BERT and RoBERTa encoders over flat rows of cells: q, k and v in one product, and attention without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.encoder.layouts import Cells
from batchwright.encoder.packed_attention import choose_attention
from batchwright.engine.bodies.linear import can_pack
from batchwright.engine.bodies.weights import Weights

_TYPICAL_ROWS = 512
"""Number of rows for which oneDNN picks the packed layout; an encoder's batches have hundreds."""

_ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_new": ("gelu", "tanh"), "gelu_pytorch_tanh": ("gelu", "tanh")}
_PLAIN = ("none", "")

ACTIVATIONS = frozenset(_ACTIVATIONS)
"""Activations that a `Product` can apply, by their names in a transformers config."""


class Product:
    """`x · weightᵀ + bias` for `weight` [out, in], followed by an activation. The CPU works on a repacked copy."""

    # torch packs weights and fuses activations only through private operators; inductor, its compiler, uses them too.

    def __init__(self, weight: Tensor, bias: Tensor, activation: str | None = None) -> None:
        self._kind, self._algorithm = _PLAIN if activation is None else _ACTIVATIONS[activation]
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
        self._weight = reorder(weight, _TYPICAL_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product of `x` [rows, in] -> [rows, out]."""
        if self._packed:
            fused = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
            out: Tensor = fused(x, self._weight, self._bias, self._kind, [], self._algorithm)
            return out
        out = functional.linear(x, self._weight, self._bias)
        return functional.gelu(out, approximate=self._algorithm) if self._kind == "gelu" else out

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product, without the activation, plus `other` [rows, out] -> [rows, out]."""
        if self._packed:
            fused = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001
            out: Tensor = fused(x, other, self._weight, self._bias, "add")
            return out
        return functional.linear(x, self._weight, self._bias) + other


_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "camembert": "roberta."}
"""Prefix of the encoder's tensors, by model type, in checkpoints that include a head for another task."""
_WORDS = "embeddings.word_embeddings.weight"


_Norm: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class _Layer:
    qkv: Product
    output: Product
    attention_norm: _Norm
    up: Product
    down: Product
    norm: _Norm


class BertBody:
    """Body of a model for whose transformers config, `config`, `unsuitable` returned None."""

    name = "fused"

    def __init__(self, config: Any, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self.dim: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self._offset = _offset(config)
        self.max_positions = self.positions_of(config)
        """Tokens of the longest sequence that the model can compute."""
        self._device = device
        tensors = _Tensors(weights, "" if weights.has(_WORDS) else _PREFIXES[config.model_type], config)
        self._words = tensors.take(_WORDS)
        # The first token type is part of the positions, and the others are added as the difference from it.
        types = tensors.take("embeddings.token_type_embeddings.weight").float()
        self._type_shifts = (types - types[0]).to(dtype)
        positions = tensors.take("embeddings.position_embeddings.weight").float()
        self._positions = (positions + types[0]).to(dtype)
        self._embedding_norm = tensors.norm("embeddings.LayerNorm")
        self._layers = [tensors.layer(index) for index in range(config.num_hidden_layers)]
        heads = config.num_attention_heads
        self._attention = choose_attention(heads, self.dim // heads, dtype, device)

    @staticmethod
    def positions_of(config: Any) -> int:
        """Return the `max_positions` of a body for `config`."""
        return int(config.max_position_embeddings) - _offset(config)

    @property
    def description(self) -> str:
        """Names of the implementations that run."""
        return f"fused body, {self._attention.name} attention"

    def forward(self, cells: Cells) -> Tensor:
        """Return the last hidden states -> [cells, dim], meaningless at padding. Call in `torch.inference_mode`."""
        ids, positions = torch.from_numpy(cells.ids), torch.from_numpy(cells.positions)
        starts, lengths = torch.from_numpy(cells.starts), torch.from_numpy(cells.lengths)
        x = self._words[ids.to(self._device)] + self._positions[positions.to(self._device) + self._offset]
        if cells.types is not None:
            x += self._type_shifts[torch.from_numpy(cells.types).to(self._device)]
        x = self._embedding_norm(x)
        for layer in self._layers:
            attended = self._attention.attend(layer.qkv(x), starts, lengths)
            x = layer.attention_norm(layer.output.plus(attended, x))
            x = layer.norm(layer.down.plus(layer.up(x), x))
        return x


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Tensors of a checkpoint whose names begin with `prefix`."""

    weights: Weights
    prefix: str
    config: Any

    def layer(self, index: int) -> _Layer:
        at = f"encoder.layer.{index}."
        attention = at + "attention."
        return _Layer(
            qkv=self.product([f"{attention}self.{name}" for name in ("query", "key", "value")]),
            output=self.product([attention + "output.dense"]),
            attention_norm=self.norm(attention + "output.LayerNorm"),
            up=self.product([at + "intermediate.dense"], self.config.hidden_act),
            down=self.product([at + "output.dense"]),
            norm=self.norm(at + "output.LayerNorm"),
        )

    def product(self, names: list[str], activation: str | None = None) -> Product:
        weight, bias = (torch.cat([self.take(f"{name}.{kind}") for name in names]) for kind in ("weight", "bias"))
        return Product(weight, bias, activation)

    def norm(self, name: str) -> _Norm:
        weight, bias = self.take(name + ".weight"), self.take(name + ".bias")
        eps = float(self.config.layer_norm_eps)
        return lambda x: functional.layer_norm(x, weight.shape, weight, bias, eps)

    def take(self, name: str) -> Tensor:
        return self.weights.take(self.prefix + name)


def _offset(config: Any) -> int:
    return 0 if config.model_type == "bert" else int(config.pad_token_id) + 1


def unsuitable(config: Any, weights: Weights) -> str | None:
    """Return why the fused body cannot run a model with this transformers config and weights, or None if it can."""
    if config.model_type not in _PREFIXES:
        return f"model_type {config.model_type!r} is not of the BERT family"
    if config.hidden_act not in ACTIVATIONS:
        return f"hidden_act {config.hidden_act!r} is none of {', '.join(sorted(ACTIVATIONS))}"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return "its positions are relative"
    if getattr(config, "is_decoder", False):
        return "it is a decoder"
    if getattr(config, "quantization_config", None) is not None:
        return "the weights are quantized"
    norm = "embeddings.LayerNorm.weight"  # old checkpoints call it gamma
    if not (weights.has(norm) or weights.has(_PREFIXES[config.model_type] + norm)):
        return "its tensors have other names"
    return None
