"""The Llama family with fused products: q, k and v in one, gate and up in one.

Llama, Mistral, Qwen2, Qwen3 and what shares their config (SmolLM and SmolLM2 are Llamas) differ in three points only,
each read from the config or the weights: biases on q, k and v (Qwen2), RMS norms on the heads of q and k (Qwen3), and
layers that see a sliding window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchwright.engine.attention import AttentionShape, KVShape
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.batch import StepBatch
from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.linear import Linear, make_linear
from batchwright.engine.bodies.ops import HeadShape, LayerOps, NativeOps, RopeTable, TorchOps
from batchwright.engine.bodies.weights import Weights
from batchwright.engine.native.kernels import LANES

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Those whose frequencies do not depend on the length of the sequence."""


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention: AttentionShape
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LlamaBody(ModelBody):
    """`config` is the transformers config of a model for which `unsuitable` returned None."""

    name = "fused"

    def __init__(self, config: Any, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self._eps = config.rms_norm_eps
        self._hidden, self._intermediate = config.hidden_size, config.intermediate_size
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = HeadShape(config.num_attention_heads, config.num_key_value_heads, head_dim)
        self._rope = _rope_table(config, device)
        self._embedding = weights.take("model.embed_tokens.weight")
        self._layers = [self._layer(config, weights, index) for index in range(config.num_hidden_layers)]
        self._norm = weights.take("model.norm.weight")
        tied = config.tie_word_embeddings or not weights.has("lm_head.weight")
        self._head = make_linear(self._embedding if tied else weights.take("lm_head.weight"))
        self._ops: LayerOps

    def kv_shapes(self, num_blocks: int, block_size: int) -> list[KVShape]:
        shape = self._shape
        layer = KVShape(num_blocks, block_size, shape.kv_heads, shape.head_dim, self.dtype, self.device)
        return [layer] * len(self._layers)

    def allocate(self, num_blocks: int, block_size: int, attention: str) -> None:
        super().allocate(num_blocks, block_size, attention)
        whole_vectors = self._hidden % LANES == 0 and self._intermediate % LANES == 0
        if isinstance(self.attention, NativeAttention) and whole_vectors:
            self._ops = NativeOps(self.attention.kernels)
        else:
            self._ops = TorchOps(self.attention)

    def forward(self, batch: StepBatch) -> Tensor:
        ops, shape, eps = self._ops, self._shape, self._eps
        queries = shape.heads * shape.head_dim
        residual = self._embedding[batch.token_ids]
        delta: Tensor | None = None
        for layer, cache in zip(self._layers, self.caches, strict=True):
            qkv = layer.qkv(ops.add_rms_norm(delta, residual, layer.input_norm, eps))
            if layer.query_norm is not None and layer.key_norm is not None:
                ops.head_rms_norm(qkv, layer.query_norm, shape.heads, eps)
                ops.head_rms_norm(qkv[:, queries:], layer.key_norm, shape.kv_heads, eps)
            ops.rope_and_store(qkv, cache, self._rope, shape, batch)
            attended = self.attention.attend(qkv[:, :queries], cache, layer.attention, batch)
            hidden = ops.add_rms_norm(layer.output(attended), residual, layer.post_norm, eps)
            delta = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        rows = batch.logit_rows
        last = residual[rows] if delta is None else residual[rows] + delta[rows]
        return self._head(ops.add_rms_norm(None, last, self._norm, eps))

    def _layer(self, config: Any, weights: Weights, index: int) -> _Layer:
        at = f"model.layers.{index}."
        attention, mlp = at + "self_attn.", at + "mlp."
        return _Layer(
            input_norm=weights.take(at + "input_layernorm.weight"),
            qkv=_fused(weights, [attention + name for name in ("q_proj", "k_proj", "v_proj")]),
            query_norm=weights.maybe(attention + "q_norm.weight"),
            key_norm=weights.maybe(attention + "k_norm.weight"),
            attention=AttentionShape(self._shape.heads, self._shape.head_dim**-0.5, _window(config, index)),
            output=_fused(weights, [attention + "o_proj"]),
            post_norm=weights.take(at + "post_attention_layernorm.weight"),
            gate_up=_fused(weights, [mlp + "gate_proj", mlp + "up_proj"]),
            down=_fused(weights, [mlp + "down_proj"]),
        )


def unsuitable(config: Any) -> str | None:
    """Why the fused body cannot run a model with this transformers config, or None if it can."""
    if config.model_type not in FAMILY:
        return f"model_type {config.model_type!r} is not of the Llama family"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        return f"rope_type {rope_type!r} depends on the length of the sequence"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        return "only a part of each head is rotated"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r} is not silu"
    if getattr(config, "quantization_config", None) is not None:
        return "the weights are quantized"
    return None


def _fused(weights: Weights, names: list[str]) -> Linear:
    weight = torch.cat([weights.take(name + ".weight") for name in names])
    biases = [weights.maybe(name + ".bias") for name in names]
    present = [bias for bias in biases if bias is not None]
    if present and len(present) != len(biases):
        raise KeyError(f"some of {', '.join(names)} have a bias and some have none")
    return make_linear(weight, torch.cat(present) if present else None)


def _window(config: Any, layer: int) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    if kinds is None and not getattr(config, "use_sliding_window", True):
        return None
    return window


def _rope_table(config: Any, device: torch.device) -> RopeTable:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = positions[:, None] * rotary.inv_freq.float()[None, :]
    scaling = float(rotary.attention_scaling)
    return RopeTable((angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device))
