"""Weights in the layout of `grouped.h`: numbers of 4 or 8 bits, with a scale for each 32 inputs of an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.weight_panels import PANEL, PackedLinear, padded, padded_outputs

GROUP = 32
"""Inputs that share a scale."""
_LANES = PANEL // 2
_UNIT = 4
"""Inputs that are multiplied together."""
_UNITS = GROUP // _UNIT
_HALF = 2
"""Bytes of a float16."""
_ZERO = 128
"""Stored value of 0 with 8 bits."""
_LEVELS = {4: 15, 8: 127}
_AT_A_TIME = 4096
"""Outputs that are rounded at a time, since their values are held in float32."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [outputs, inputs] as numbers: (numbers - 128) · scale with 8 bits, numbers · scale + offset with 4."""

    numbers: Tensor
    """[outputs, inputs] uint8; with 4 bits [outputs, inputs / 2], where the bytes of a group have the numbers of its
    first half in their lower bits, and those of its second half in their upper bits."""
    scales: Tensor
    """[outputs, groups] float16, as are `offsets`."""
    offsets: Tensor | None
    """None with 8 bits."""

    @classmethod
    def of(cls, numbers: Tensor, scales: Tensor, offsets: Tensor | None) -> GroupedWeight:
        """Return the weight of `numbers` [outputs, inputs] uint8, each in a byte of its own."""
        if offsets is None:
            return cls(numbers, scales, None)
        halves = numbers.view(*scales.shape, 2, GROUP // 2)
        return cls((halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1), scales, offsets)

    @property
    def shape(self) -> torch.Size:
        """Outputs and inputs."""
        outputs, groups = self.scales.shape
        return torch.Size((outputs, groups * GROUP))

    @property
    def unpacked(self) -> Tensor:
        """The numbers, each in a byte of its own: [outputs, inputs] uint8."""
        if self.offsets is None:
            return self.numbers
        halves = self.numbers.view(*self.scales.shape, GROUP // 2)
        return torch.cat([halves & 15, halves >> 4], dim=2).flatten(1)

    @property
    def bits(self) -> int:
        """Bits of its numbers."""
        return 8 if self.offsets is None else 4

    @property
    def values(self) -> Tensor:
        """The weight itself: [outputs, inputs] float32."""
        groups = self.unpacked.float().view(*self.scales.shape, GROUP)
        scales = self.scales.float()[..., None]
        if self.offsets is None:
            return ((groups - _ZERO) * scales).view(self.shape)
        return (groups * scales + self.offsets.float()[..., None]).view(self.shape)


def round_to_groups(weight: Tensor, bits: int) -> GroupedWeight:
    """Round `weight` [outputs, inputs] to the nearest numbers of 4 or 8 bits, group by group.

    With 8 bits the greatest magnitude of a group becomes ±127; with 4 its least value becomes 0, its greatest 15.
    """
    if len(weight) > _AT_A_TIME:
        return joined([round_to_groups(piece, bits) for piece in weight.split(_AT_A_TIME)])
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    if bits == 8:
        scales = (groups.abs().amax(2) / _LEVELS[bits]).half()
        numbers = (groups * _inverse(scales)[..., None]).round().clamp(-_LEVELS[bits], _LEVELS[bits]) + _ZERO
        return GroupedWeight(numbers.to(torch.uint8).view(weight.shape), scales, None)
    offsets = groups.amin(2).half()
    scales = ((groups.amax(2) - offsets.float()) / _LEVELS[bits]).half()
    numbers = ((groups - offsets.float()[..., None]) * _inverse(scales)[..., None]).round().clamp(0, _LEVELS[bits])
    return GroupedWeight.of(numbers.to(torch.uint8).view(weight.shape), scales, offsets)


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Return weights of the same inputs as one, their outputs one after another; in 8 bits if they differ in bits."""
    offsets = [each.offsets for each in weights if each.offsets is not None]
    if offsets and len(offsets) < len(weights):
        return joined([each if each.offsets is None else round_to_groups(each.values, 8) for each in weights])
    return GroupedWeight(
        torch.cat([each.numbers for each in weights]),
        torch.cat([each.scales for each in weights]),
        torch.cat(offsets) if offsets else None,
    )


def pack_groups(
    shape: torch.Size, bits: int, rounded: Callable[[], GroupedWeight], bias: Tensor | None, arena: Arena
) -> PackedLinear:
    """Pack a weight of this shape, for which `rounded` returns its numbers of `bits` bits.

    `rounded` is called only if the arena does not hold the weight yet. `bias` is [outputs] or None.
    """
    outputs, inputs = shape
    panels = arena.hold(
        (padded_outputs(outputs) // PANEL, PANEL // _LANES, _bytes_of_lanes(inputs, bits)),
        torch.uint8,
        lambda: _panels(rounded(), bits),
    )
    wide_bias = None if bias is None else padded(bias.float())
    return PackedLinear(panels, wide_bias, None, None, inputs, outputs, bits)


def grouped_bytes(shape: torch.Size, bits: int) -> int:
    """Return the bytes that `pack_groups` takes from the arena."""
    outputs, inputs = shape
    return padded_outputs(outputs) // _LANES * _bytes_of_lanes(inputs, bits)


def _bytes_of_lanes(inputs: int, bits: int) -> int:
    """Return the bytes of 16 outputs."""
    scales = 1 if bits == 8 else 2
    return inputs // GROUP * _LANES * (GROUP * bits // 8 + scales * _HALF)


def _panels(weight: GroupedWeight, bits: int) -> Tensor:
    """Return numbers, scales and offsets of group after group, for each 16 outputs -> [panels, 2, bytes] uint8."""
    units = _UNITS * bits // 8
    lanes = padded(weight.numbers).view(-1, _LANES, weight.scales.shape[1], units, _UNIT).permute(0, 2, 3, 1, 4)
    parts = [lanes, *(_of_lanes(each) for each in (weight.scales, weight.offsets) if each is not None)]
    of_lanes = torch.cat([part.reshape(*lanes.shape[:2], -1) for part in parts], dim=2)
    return of_lanes.view(-1, PANEL // _LANES, lanes.shape[1] * of_lanes.shape[2])


def _of_lanes(values: Tensor) -> Tensor:
    """Return float16 [outputs, groups] as bytes, 16 outputs side by side -> [outputs / 16, groups, bytes]."""
    return padded(values).view(-1, _LANES, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1.0 / wide, torch.zeros_like(wide))
