"""Weights in the layout of `product.h`: panels of 32 columns, unit after unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.native.large_pages import Arena

PANEL = 32
_HALF = PANEL // 2
_UNIT = 4
"""Bytes of a unit."""
_BYTES_OF_SCALES = 8
"""Bytes of the scale and the sum of an output in int8."""
LEVELS = 127
"""Greatest magnitude of an int8 value: the scale is symmetric, so -128 is not used."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [outputs, inputs] for the compiled products; outputs are padded with zeros to whole panels."""

    panels: Tensor
    """[panels, units of inputs, 32, values in a unit], bfloat16 or int8."""
    bias: Tensor | None
    """[outputs, padded] float32."""
    scales: Tensor | None
    """Scale of each output, for int8: [outputs, padded] float32."""
    sums: Tensor | None
    """128 times the sum of each output's weights, for int8: [outputs, padded] int32."""
    inputs: int
    outputs: int
    bits: int = 0
    """Bits of the numbers of a weight in groups, which `panels` holds as `weight_groups.py` lays them out; else 0."""

    @property
    def panel_bytes(self) -> int:
        return self.panels[0].nbytes


def pack(weight: Tensor, bias: Tensor | None, arena: Arena, *, quantized: bool) -> PackedLinear:
    """Pack `weight` [outputs, inputs], bfloat16, unchanged or in int8. `inputs` must be a multiple of 4."""
    outputs, inputs = weight.shape
    wide_bias = None if bias is None else padded(bias.float())
    if not quantized:
        return PackedLinear(
            _panels(weight.shape, weight.dtype, lambda: weight, arena), wide_bias, None, None, inputs, outputs
        )
    return pack_rounded(weight.shape, lambda: quantize_rows(weight), wide_bias, arena)


def pack_rounded(
    shape: torch.Size, rounded: Callable[[], tuple[Tensor, Tensor]], bias: Tensor | None, arena: Arena
) -> PackedLinear:
    """Pack a weight of this shape, for which `rounded` returns what `quantize_rows` does.

    `rounded` is called only if the arena does not hold the weight yet. `bias` is float32 [outputs, padded to panels].
    """
    once = cache(rounded)
    outputs, inputs = shape
    return PackedLinear(
        _panels(shape, torch.int8, lambda: once()[0], arena),
        bias,
        arena.hold((padded_outputs(outputs),), torch.float32, lambda: padded(once()[1])),
        arena.hold((padded_outputs(outputs),), torch.int32, lambda: padded(once()[0].sum(1, dtype=torch.int32) * 128)),
        inputs,
        outputs,
    )


def packed_bytes(weight: Tensor, *, quantized: bool) -> int:
    """Return the bytes that `pack` takes from the arena."""
    outputs, inputs = weight.shape
    return padded_outputs(outputs) * (inputs + _BYTES_OF_SCALES if quantized else 2 * inputs)


def padded_outputs(outputs: int) -> int:
    """Return the number of outputs in whole panels."""
    return -(-outputs // PANEL) * PANEL


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave 16 rows each of `gate` and `up` [outputs, inputs], so that each panel holds both for 16 outputs."""
    inputs = gate.shape[1]
    pairs = torch.stack((gate.view(-1, _HALF, inputs), up.view(-1, _HALF, inputs)), dim=1)
    return pairs.view(-1, inputs)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round `x` [rows, dim] -> int8 and scales [rows] float32: x ≈ whole · scale, the greatest of a row being ±127."""
    wide = x.float()
    scales = torch.maximum(wide.amax(1), -wide.amin(1)) / LEVELS
    inverse = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
    return (wide * inverse[:, None]).round_().to(torch.int8), scales


def padded(x: Tensor) -> Tensor:
    """Return `x` [outputs, ...] padded with zeros to whole panels."""
    missing = -x.shape[0] % PANEL
    if not missing:
        return x.contiguous()
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def _panels(shape: torch.Size, dtype: torch.dtype, weight: Callable[[], Tensor], arena: Arena) -> Tensor:
    per_unit = _UNIT // dtype.itemsize
    units = shape[1] // per_unit

    def panels() -> Tensor:
        # Units are copied as integers of 4 bytes, which is several times as fast.
        return padded(weight()).view(torch.int32).view(-1, PANEL, units).transpose(1, 2)

    packed = arena.hold((padded_outputs(shape[0]) // PANEL, units, PANEL), torch.int32, panels)
    return packed.view(dtype).view(*packed.shape, per_unit)
