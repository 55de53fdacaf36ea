"""Llama layers composed of torch's products and the operations between them, on any device and in any dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from batchwright.engine.attention import AttentionBackend, AttentionShape, LayerCache
from batchwright.engine.attention.choice import PLANNED
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.attention.paged import PagedAttention
from batchwright.engine.bodies.linear import (
    Linear,
    fp8_linear,
    make_linear,
    make_quantized_linear,
    rounds_by_company,
    to_fp8,
)
from batchwright.engine.bodies.ops import LayerOps, NativeOps, TorchOps, choose_ops
from batchwright.engine.bodies.rotation import mix
from batchwright.engine.bodies.shard import WHOLE, Shard
from batchwright.engine.bodies.streaming import choose_streamed
from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Projection
from batchwright.engine.native.kernels import LANES
from batchwright.engine.step.batch import StepBatch

if TYPE_CHECKING:
    from batchwright.engine.bodies.triton_products import StreamedProducts

_TOLERANCE = 2e-2
"""Greatest relative norm of the difference between streamed products and torch's: bfloat16 rounds to within 0.4%, a
block left out of a sum makes 9%."""
_FP8_INPUT_TOLERANCE = 7e-2
"""The same if torch rounds the input of each product to 8-bit floating point, by 2.6% on average, and streamed products
do not."""


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
    weights: LayerWeights | None
    """The layer's weights, kept if they may be streamed."""
    attention: AttentionShape
    cache: LayerCache


class ComposedStack:
    """Stack that takes the layers out of `weights`, the weights of `shard`.

    It multiplies in int8 if `quantized`. If `fp8`, all weights except that of the logits are in 8-bit floating point,
    and so are their inputs, unless products are streamed.

    The ranks of a shard compute each step at the same time. Each gives the logits of its part of the vocabulary.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        caches: list[LayerCache],
        attention: AttentionBackend,
        *,
        quantized: bool,
        fp8: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        self.products = "torch products"
        self._attention, self._quantized, self._shard = attention, quantized, shard
        self._fp8 = fp8
        self._make_linear = make_quantized_linear if quantized else make_linear
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
        whole = shard.is_whole and not quantized and weights.mix == 1 and not weights.biased_mlp
        self._may_stream = whole and isinstance(attention, PagedAttention) and attention.name in PLANNED
        self._layers = [self._layer(weights.layers.pop(0), cache) for cache in caches]
        self._norm = weights.norm
        self._head = self._make_linear(weights.head.weight, weights.head.bias)
        self._head_weights = weights.head if self._may_stream else None
        self._streamed = [] if self._head_weights is None else self._choose_streamed(self._head_weights)
        if self._streamed:
            self.products += f", streamed for up to {self._streamed[-1].rows} rows"

    def logits(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Return the logits [R, vocab] for the embeddings `residual` [T, hidden] of a step, which are overwritten."""
        ops, shape, eps = self._ops, self._shape, self._eps
        streamed = next((each for each in self._streamed if batch.num_tokens <= each.rows), None)
        queries = shape.heads * shape.head_dim
        delta: Tensor | None = None
        for layer in self._layers:
            cache = layer.cache
            qkv = self._qkv(layer, streamed, delta, residual)
            if layer.query_norm is not None and layer.key_norm is not None:
                ops.head_rms_norm(qkv, layer.query_norm, shape.heads, eps)
                ops.head_rms_norm(qkv[:, queries:], layer.key_norm, shape.kv_heads, eps)
            ops.rope_and_store(qkv, cache, self._rope, shape, batch)
            attended = self._attention.attend(qkv[:, :queries], cache, layer.attention, batch)
            delta = self._finish(layer, streamed, attended, residual)
        rows = batch.logit_rows
        if rows.shape[0] < batch.num_tokens:
            residual, delta = residual[rows], None if delta is None else delta[rows]
        return self._logits(streamed, delta, residual)

    def _qkv(self, layer: _Layer, streamed: StreamedProducts | None, delta: Tensor | None, residual: Tensor) -> Tensor:
        if streamed is not None and layer.weights is not None:
            return streamed.qkv(layer.weights, residual, self._eps)
        return layer.qkv(self._ops.add_rms_norm(delta, residual, layer.input_norm, self._eps))

    def _finish(
        self, layer: _Layer, streamed: StreamedProducts | None, attended: Tensor, residual: Tensor
    ) -> Tensor | None:
        """Compute what follows attention in a layer; return what is still to be added to `residual`."""
        if streamed is not None and layer.weights is not None:
            streamed.finish(layer.weights, residual, attended, self._eps)
            return None
        hidden = self._ops.add_rms_norm(layer.output(attended), residual, layer.post_norm, self._eps)
        return layer.down(self._ops.silu_mul(layer.gate_up(hidden)))

    def _logits(self, streamed: StreamedProducts | None, delta: Tensor | None, residual: Tensor) -> Tensor:
        if streamed is not None and streamed.takes_head and self._head_weights is not None:
            return streamed.logits(self._head_weights, residual, self._norm, self._eps)
        return self._head(self._ops.add_rms_norm(delta, residual, self._norm, self._eps))

    def _choose_streamed(self, head: Projection) -> list[StreamedProducts]:
        """Return streamed products that are faster here than torch's, by ascending numbers of rows."""

        def products(
            streamed: StreamedProducts | None, residual: Tensor, attended: Tensor, layers: int | None
        ) -> list[Tensor]:
            delta, found = None, []
            for layer in self._layers[:layers]:
                found = [self._qkv(layer, streamed, delta, residual)]
                delta = self._finish(layer, streamed, attended, residual)
            return [*found, self._logits(streamed, delta, residual), residual]

        weights = [each.weights for each in self._layers if each.weights is not None]
        projections = [part for each in weights for part in (each.qkv, each.output, each.gate_up, each.down)]
        queries = self._shape.heads * self._shape.head_dim
        tolerance = _FP8_INPUT_TOLERANCE if self._fp8 else _TOLERANCE
        return choose_streamed(products, [*projections, head], self._norm, queries, self._ops, tolerance)

    def rows_for(self, tokens: int) -> int:
        return 2 if tokens == 1 and self._norm.device.type == "cpu" and not self._quantized else tokens

    def why_not_deterministic(self, rows: int, logit_rows: int) -> str | None:
        """Return what `ModelBody` does, for native attention on the CPU. Layers are alike, so one is tried."""
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
        if self._fp8:
            weights = _in_fp8(weights)
        scale, channels, down = self._shape.head_dim**-0.5, self._mix, self._projected(weights.down)
        return _Layer(
            input_norm=weights.input_norm,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            post_norm=weights.post_norm,
            qkv=self._projected(weights.qkv),
            output=self._summed(self._projected(weights.output)),
            gate_up=self._projected(weights.gate_up),
            down=self._summed(down if channels == 1 else lambda x: down(mix(x, channels))),
            weights=weights if self._may_stream else None,
            attention=AttentionShape(self._shape.heads, scale, weights.window),
            cache=cache,
        )

    def _summed(self, linear: Linear) -> Linear:
        shard = self._shard
        return linear if shard.is_whole else lambda x: shard.summed(linear(x))

    def _projected(self, projection: Projection) -> Linear:
        if projection.scales is not None:
            return fp8_linear(projection.weight, projection.scales, projection.bias)
        return self._make_linear(projection.weight, projection.bias)


def _in_fp8(weights: LayerWeights) -> LayerWeights:
    """Return `weights` with projections in 8-bit floating point."""

    def rounded(projection: Projection) -> Projection:
        weight, scales = to_fp8(projection.weight)
        return Projection(weight, projection.bias, scales)

    qkv, output, gate_up, down = (
        rounded(each) for each in (weights.qkv, weights.output, weights.gate_up, weights.down)
    )
    return replace(weights, qkv=qkv, output=output, gate_up=gate_up, down=down)
