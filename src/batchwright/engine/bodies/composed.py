"""Llama layers composed of torch's products and the operations between them, on any device and in any dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchwright.engine.attention import AttentionBackend, AttentionShape, LayerCache
from batchwright.engine.attention.choice import PLANNED
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.bodies.linear import Linear, make_linear, make_quantized_linear, rounds_by_company
from batchwright.engine.bodies.ops import LayerOps, NativeOps, TorchOps, choose_ops
from batchwright.engine.bodies.rotation import mix
from batchwright.engine.bodies.shard import WHOLE, Shard
from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Projection
from batchwright.engine.native.kernels import LANES
from batchwright.engine.step.batch import StepBatch


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    attention: AttentionShape
    cache: LayerCache


class ComposedStack:
    """Stack that takes the layers out of `weights`, which are those of `shard`; if `quantized`, it multiplies in int8.

    The ranks of a shard compute each step at the same time. Each gives the logits of its part of the vocabulary.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        caches: list[LayerCache],
        attention: AttentionBackend,
        *,
        quantized: bool,
        shard: Shard = WHOLE,
    ) -> None:
        self.products = "torch products"
        self._attention, self._quantized, self._shard = attention, quantized, shard
        self._shape, self._rope, self._eps = weights.shape, weights.rope, weights.eps
        self._intermediate = weights.intermediate
        whole_vectors = weights.hidden % LANES == 0 and weights.intermediate % LANES == 0
        self._ops: LayerOps = TorchOps(attention)
        if isinstance(attention, NativeAttention) and whole_vectors:
            self._ops = NativeOps(attention.kernels)
        elif isinstance(attention, PagedAttention) and attention.name in PLANNED:
            norm = weights.norm
            self._ops = choose_ops(attention, weights.shape, weights.hidden, norm.dtype, norm.device)
        self._mix = weights.mix
        self._layers = [self._layer(weights.layers.pop(0), cache) for cache in caches]
        self._norm = weights.norm
        self._head = self._linear(weights.head)

    def logits(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Return the logits [R, vocab] for the embeddings `residual` [T, hidden] of a step, which are overwritten."""
        ops, shape, eps = self._ops, self._shape, self._eps
        queries = shape.heads * shape.head_dim
        delta: Tensor | None = None
        for layer in self._layers:
            cache = layer.cache
            qkv = layer.qkv(ops.add_rms_norm(delta, residual, layer.input_norm, eps))
            if layer.query_norm is not None and layer.key_norm is not None:
                ops.head_rms_norm(qkv, layer.query_norm, shape.heads, eps)
                ops.head_rms_norm(qkv[:, queries:], layer.key_norm, shape.kv_heads, eps)
            ops.rope_and_store(qkv, cache, self._rope, shape, batch)
            attended = self._attention.attend(qkv[:, :queries], cache, layer.attention, batch)
            hidden = ops.add_rms_norm(layer.output(attended), residual, layer.post_norm, eps)
            delta = layer.down(ops.silu_mul(layer.gate_up(hidden)))
        rows = batch.logit_rows
        last = residual[rows] if delta is None else residual[rows] + delta[rows]
        return self._head(ops.add_rms_norm(None, last, self._norm, eps))

    def rows_for(self, tokens: int) -> int:
        return 2 if tokens == 1 and self._norm.device.type == "cpu" and not self._quantized else tokens

    def why_not_deterministic(self, rows: int, logit_rows: int) -> str | None:
        """Answer as `ModelBody` does, for native attention on the CPU. Layers are alike, so one layer is tried."""
        if not isinstance(self._ops, NativeOps):
            return (
                "torch's norms may round a row differently in other company, and the compiled ones need a hidden and "
                f"an intermediate size divisible by {LANES}"
            )
        if self._quantized:
            return None  # sums of integers are exact
        hidden, queries, first = self._norm.shape[0], self._shape.heads * self._shape.head_dim, self._layers[0]
        for product, inputs, most in (
            (first.qkv, hidden, rows),
            (first.output, queries, rows),
            (first.gate_up, hidden, rows),
            (first.down, self._intermediate, rows),
            (self._head, hidden, logit_rows),
        ):
            if (found := rounds_by_company(product, inputs, self._norm.dtype, most)) is not None:
                return (
                    f"torch's products on this processor round a row differently among {found} rows than among {most}; "
                    "use quantization='int8', whose sums are exact"
                )
        return None

    def _layer(self, weights: LayerWeights, cache: LayerCache) -> _Layer:
        scale, channels, down = self._shape.head_dim**-0.5, self._mix, self._linear(weights.down)
        return _Layer(
            input_norm=weights.input_norm,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            post_norm=weights.post_norm,
            qkv=self._linear(weights.qkv),
            output=self._summed(self._linear(weights.output)),
            gate_up=self._linear(weights.gate_up),
            down=self._summed(down if channels == 1 else lambda x: down(mix(x, channels))),
            attention=AttentionShape(self._shape.heads, scale, weights.window),
            cache=cache,
        )

    def _summed(self, linear: Linear) -> Linear:
        shard = self._shard
        return linear if shard.is_whole else lambda x: shard.summed(linear(x))

    def _linear(self, projection: Projection) -> Linear:
        make = make_quantized_linear if self._quantized else make_linear
        return make(projection.weight, projection.bias)
