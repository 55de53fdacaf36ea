"""Rotations that spread outliers over many values before rows of activations share a scale of 8 bits.

A few channels of the residual stream are twenty times as large as the others, so they set the scale of a row and the
others are left with a handful of levels. Rotating the stream by an orthogonal matrix Q spreads them over all channels
and changes nothing else: the weights that read the stream rotate it back, W·x = (W·Q)·(Qᵀ·x), an RMS norm depends only
on the length of a row, and its own weights are merged into those that read it. This is QuaRot (Ashkboos et al., 2024)
without the parts that would have to be computed in each step.

The input of `down` has outliers of its own, in different channels for each token. When it is quantized, it is mixed by
a Hadamard transform over groups of `mix` channels, 16 apart, as is its weight.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Projection

_LANES = 16
_MOST_MIXED = 32
_MOST_HADAMARD = 64


class Rotation:
    """An orthogonal matrix Q [size, size]: a fixed random one ⊗ a Hadamard matrix, which makes applying it cheap."""

    def __init__(self, size: int) -> None:
        power = min(size & -size, _MOST_HADAMARD)
        generator = torch.Generator().manual_seed(0)
        normal = torch.randn(size // power, size // power, generator=generator, dtype=torch.float64)
        self._outer = torch.linalg.qr(normal).Q.float()
        self._inner = hadamard(power)

    def turn(self, x: Tensor) -> Tensor:
        """Return x·Q for `x` [..., size], in its dtype -> [..., size]."""
        outer, inner = self._outer.to(x.device), self._inner.to(x.device)
        grid = x.float().reshape(-1, outer.shape[0], inner.shape[0])
        turned: Tensor = torch.einsum("rij,ik,jl->rkl", grid, outer, inner)
        return turned.reshape(x.shape).to(x.dtype)


def rotate(weights: LlamaWeights, embedding: Tensor) -> Tensor:
    """Rotate the residual stream of a model and mix the inputs of `down`, in place; return the rotated `embedding`."""
    rotation = Rotation(weights.hidden)
    weights.mix = mixed_channels(weights.intermediate)
    for index, layer in enumerate(weights.layers):
        weights.layers[index] = _rotated(layer, rotation, weights.mix)
    weights.head = _reading(weights.head, weights.norm, rotation)
    weights.norm = torch.ones_like(weights.norm)
    weights.tied = False
    return rotation.turn(embedding)


def mixed_channels(size: int) -> int:
    """Return how many channels are mixed with each other in rows of `size`; 1 if none are."""
    vectors = size // _LANES if size % _LANES == 0 else 1
    return min(vectors & -vectors, _MOST_MIXED)


def mix(x: Tensor, channels: int) -> Tensor:
    """Apply the Hadamard transform to each `channels` values 16 apart in the last dimension of `x`, in its dtype."""
    if channels == 1:
        return x
    groups = x.float().reshape(-1, channels, _LANES)
    mixed: Tensor = torch.einsum("ij,rjl->ril", hadamard(channels).to(x.device), groups)
    return mixed.reshape(x.shape).to(x.dtype)


def hadamard(size: int) -> Tensor:
    """Return the symmetric orthogonal matrix of Sylvester's construction [size, size]; `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def _rotated(layer: LayerWeights, rotation: Rotation, channels: int) -> LayerWeights:
    down = _writing(layer.down, rotation)
    return replace(
        layer,
        input_norm=torch.ones_like(layer.input_norm),
        qkv=_reading(layer.qkv, layer.input_norm, rotation),
        output=_writing(layer.output, rotation),
        post_norm=torch.ones_like(layer.post_norm),
        gate_up=_reading(layer.gate_up, layer.post_norm, rotation),
        down=Projection(mix(down.weight, channels), down.bias),
    )


def _reading(projection: Projection, norm: Tensor, rotation: Rotation) -> Projection:
    turned = rotation.turn(projection.weight.float() * norm.float())
    return Projection(turned.to(projection.weight.dtype), projection.bias)


def _writing(projection: Projection, rotation: Rotation) -> Projection:
    bias = None if projection.bias is None else rotation.turn(projection.bias)
    return Projection(rotation.turn(projection.weight.t()).t().contiguous(), bias)
