"""Turning the residual stream: it changes nothing but how large the largest values are."""

from __future__ import annotations

import pytest
import torch

from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.bodies.rotation import Rotation, hadamard, mix, mixed_channels, rotate
from batchwright.engine.bodies.weights import LayerWeights, LlamaWeights, Projection
from batchwright.engine.native.weight_panels import quantize_rows


def _random(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 16, 96, 576, 896])
def test_a_rotation_keeps_lengths_and_angles(size: int) -> None:
    x = _random(5, size, seed=1)
    turned = Rotation(size).turn(x)
    torch.testing.assert_close(turned @ turned.t(), x @ x.t(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [96, 576, 896, 1024])
def test_one_large_channel_is_spread_over_all(size: int) -> None:
    row = torch.zeros(1, size)
    row[0, 3] = 1.0
    turned = Rotation(size).turn(row)
    assert turned.abs().max() < 8 / size**0.5
    assert (turned != 0).float().mean() > 0.99


@pytest.mark.parametrize(("size", "channels"), [(1536, 32), (96, 2), (48, 1), (4864, 16), (100, 1)])
def test_mixing_twice_is_nothing(size: int, channels: int) -> None:
    assert mixed_channels(size) == channels
    if size % 16 == 0:
        x = _random(3, size, seed=2)
        torch.testing.assert_close(mix(mix(x, channels), channels), x, rtol=1e-5, atol=1e-5)


def test_hadamard_matrices_are_symmetric_and_orthogonal() -> None:
    for size in (1, 2, 8, 32):
        matrix = hadamard(size)
        assert torch.equal(matrix, matrix.t())
        torch.testing.assert_close(matrix @ matrix, torch.eye(size))


def test_a_rotated_layer_computes_the_same() -> None:
    hidden, middle = 48, 64
    norm = _random(hidden, seed=3).abs() + 0.5
    layer = LayerWeights(
        input_norm=norm,
        qkv=Projection(_random(80, hidden, seed=4), _random(80, seed=5)),
        query_norm=None,
        key_norm=None,
        output=Projection(_random(hidden, 40, seed=6), _random(hidden, seed=7)),
        post_norm=norm,
        gate_up=Projection(_random(2 * middle, hidden, seed=8)),
        down=Projection(_random(hidden, middle, seed=9)),
        window=None,
    )
    weights = LlamaWeights(
        layers=[layer],
        norm=norm,
        head=Projection(_random(99, hidden, seed=10)),
        rope=RopeTable(torch.ones(1, 1), torch.ones(1, 1)),
        shape=HeadShape(1, 1, 1),
        hidden=hidden,
        intermediate=middle,
        eps=0.0,
    )
    head = weights.head
    stream, inner, attended = _random(4, hidden, seed=11), _random(4, middle, seed=12), _random(4, 40, seed=13)
    turned = rotate(weights, stream)
    [after] = weights.layers
    assert weights.mix == 4
    for before, now in ((layer.qkv, after.qkv), (layer.gate_up, after.gate_up), (head, weights.head)):
        torch.testing.assert_close(_applied(now, turned), _applied(before, stream * norm), rtol=1e-4, atol=1e-3)
    rotation = Rotation(hidden)
    written = rotation.turn(_applied(layer.output, attended))
    torch.testing.assert_close(_applied(after.output, attended), written, rtol=1e-4, atol=1e-3)
    written = rotation.turn(_applied(layer.down, inner))
    torch.testing.assert_close(_applied(after.down, mix(inner, weights.mix)), written, rtol=1e-4, atol=1e-3)
    assert torch.equal(after.input_norm, torch.ones(hidden))


def test_outliers_cost_less_once_they_are_spread() -> None:
    rows = _random(16, 576, seed=14)
    rows[:, 247] *= 40
    turned = Rotation(576).turn(rows)

    def error(x: torch.Tensor) -> float:
        whole, scales = quantize_rows(x)
        return float((whole * scales[:, None] - x).norm() / x.norm())

    assert error(turned) < error(rows) / 3


def _applied(projection: Projection, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, projection.weight, projection.bias)
