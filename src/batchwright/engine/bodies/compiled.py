"""Llama layers in one compiled call for each step: the CPU, bfloat16 or int8 products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchwright.engine.attention import AttentionBackend, LayerCache
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.bodies.body import StepOutput
from batchwright.engine.bodies.layers import LayerWeights, LlamaWeights, Projection
from batchwright.engine.bodies.ops import HeadShape
from batchwright.engine.bodies.screening import screen_for, screened_bytes
from batchwright.engine.native.decoder import DecoderLayer, DecoderModel, DecoderSeconds, NativeDecoder
from batchwright.engine.native.kernels import LANES, NativeKernels, load_kernels
from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.weight_panels import PANEL, PackedLinear, interleaved, pack, packed_bytes
from batchwright.engine.step.batch import StepBatch

_MOST_HEAD_DIM = 512
"""Sums of head_dim products of 16 with 8 bits must fit 32 bits."""


class CompiledStack:
    """Takes the layers out of `weights`, for which `kernels_for` has found the kernels."""

    def __init__(
        self, weights: LlamaWeights, caches: list[LayerCache], kernels: NativeKernels, *, quantized: bool
    ) -> None:
        self.products = "compiled products"
        self.seconds: DecoderSeconds | None = None
        """Set it to have the time of each step added."""
        self._quantized = quantized
        size = sum(packed_bytes(each.weight, quantized=quantized) for each in _projections(weights))
        self._arena = Arena(size + (screened_bytes(weights.head) if weights.tied else 0))
        layers = [self._layer(weights.layers.pop(0), cache) for cache in caches]
        screen = screen_for(weights.head, self._arena) if weights.tied else None
        self.screens = screen is not None
        """Whether `output` finds likeliest tokens without logits."""
        self._decoder: NativeDecoder = kernels.decoder(
            DecoderModel(
                layers=layers,
                head=self._packed(weights.head),
                screen=screen,
                norm=weights.norm,
                cosines=weights.rope.cosines,
                sines=weights.rope.sines,
                hidden=weights.hidden,
                intermediate=weights.intermediate,
                heads=weights.shape.heads,
                kv_heads=weights.shape.kv_heads,
                head_dim=weights.shape.head_dim,
                eps=weights.eps,
                mix=weights.mix,
                quantized=quantized,
            )
        )

    def logits(self, residual: Tensor, batch: StepBatch) -> Tensor:
        return self._decoder.forward(residual, batch, self.seconds)[0]

    def output(self, residual: Tensor, batch: StepBatch, greedy: Sequence[bool]) -> StepOutput:
        """For a stack that `screens`: logits, and of the rows that are `greedy` the likeliest token."""
        return StepOutput(*self._decoder.forward(residual, batch, self.seconds, greedy))

    def rows_for(self, tokens: int) -> int:
        return tokens

    def _layer(self, weights: LayerWeights, cache: LayerCache) -> DecoderLayer:
        gate, up = weights.gate_up.weight.chunk(2)
        return DecoderLayer(
            qkv=self._packed(weights.qkv),
            output=self._packed(weights.output),
            gate_up=self._packed(Projection(interleaved(gate, up))),
            down=self._packed(weights.down),
            input_norm=weights.input_norm,
            post_norm=weights.post_norm,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            keys=cache.keys,
            values=cache.values,
            window=weights.window,
        )

    def _packed(self, projection: Projection) -> PackedLinear:
        return pack(projection.weight, projection.bias, self._arena, quantized=self._quantized)


def kernels_for(weights: LlamaWeights, attention: AttentionBackend) -> NativeKernels | None:
    """The kernels with which a `CompiledStack` can run `weights`, or None."""
    if not isinstance(attention, NativeAttention) or not _usable(attention.kernels):
        return None
    suitable = _fits(weights.shape, weights.hidden, weights.intermediate, biased_mlp=weights.biased_mlp)
    return attention.kernels if suitable else None


def compiles(shape: HeadShape, hidden: int, intermediate: int, *, biased_mlp: bool) -> bool:
    """Whether a bfloat16 model of these sizes runs in a `CompiledStack` on this machine, with native attention."""
    kernels = load_kernels(torch.bfloat16)
    usable = isinstance(kernels, NativeKernels) and _usable(kernels)
    return usable and shape.head_dim % LANES == 0 and _fits(shape, hidden, intermediate, biased_mlp=biased_mlp)


def _fits(shape: HeadShape, hidden: int, intermediate: int, *, biased_mlp: bool) -> bool:
    """Whether the compiled layers can have these sizes."""
    widths = (hidden, intermediate, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    return all(width % PANEL == 0 for width in widths) and shape.head_dim <= _MOST_HEAD_DIM and not biased_mlp


def _usable(kernels: NativeKernels) -> bool:
    # With AMX torch's products use its tiles, which ours do not.
    return kernels.has_decoder and not torch.cpu._is_amx_tile_supported()  # noqa: SLF001


def _projections(weights: LlamaWeights) -> list[Projection]:
    layers = weights.layers
    return [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)] + [weights.head]
