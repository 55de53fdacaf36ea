"""The head of a model once more, in 8 bits: which tokens can be the likeliest at all (`native/screening.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from batchwright.engine.bodies.layers import Projection
from batchwright.engine.bodies.rotation import hadamard
from batchwright.engine.native.decoder import DecoderScreen
from batchwright.engine.native.kernels import LANES
from batchwright.engine.native.large_pages import Arena
from batchwright.engine.native.weight_panels import pack_rounded, packed_bytes, padded, quantize_rows

_MOST_MIXED = 8
"""Vectors that are turned together: more spread outliers no better, and take longer."""
_ROUNDED_UP = 1 + 1e-4
_MOST_LENGTH = 1e15
"""The bounds of longer columns could overflow."""
_AT_A_TIME = 4096
"""Columns."""


def screen_for(head: Projection, arena: Arena) -> DecoderScreen | None:
    """The screen of `head`, which is kept as it is; None where there can be none, with a bias or weights not finite."""
    columns = head.weight
    if head.bias is not None or columns.dtype != torch.bfloat16 or not columns.is_contiguous():
        return None
    pieces = [_rounded(piece) for piece in columns.split(_AT_A_TIME)]
    whole, scales, lengths, errors = (torch.cat(each) for each in zip(*pieces, strict=True))
    if not bool((lengths < _MOST_LENGTH).all()):  # NaN is not, either
        return None
    outputs = columns.shape[0]
    bias = padded(torch.zeros(outputs))
    bias[outputs:] = -torch.inf
    rough = pack_rounded(whole, scales, bias if len(bias) > outputs else None, arena)
    return DecoderScreen(rough, padded(lengths), padded(errors), columns, _mixed(columns.shape[1]))


def screened_bytes(head: Projection) -> int:
    """What `screen_for` takes of the arena."""
    return packed_bytes(head.weight, quantized=True)


def turned(x: Tensor) -> Tensor:
    """`x` [rows, dim] in float64, each `_mixed` vectors multiplied with a Hadamard matrix: no product changes."""
    size = _mixed(x.shape[1]) * LANES
    mixed: Tensor = x.double().view(-1, size) @ hadamard(size).double()
    return mixed.view(x.shape)


def _mixed(dim: int) -> int:
    vectors = dim // LANES
    return min(vectors & -vectors, _MOST_MIXED)


def _rounded(columns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In 8 bits with scales; its lengths; and how far a product with a row of length 1 can be from the true one."""
    exact = turned(columns)
    whole, scales = quantize_rows(exact)
    rounded = whole.double() * scales[:, None]
    lengths, lost, own = (x.norm(dim=1) for x in (rounded, exact - rounded, exact))
    in_sums = (columns.shape[1] + 64) * 2.0**-22  # sums of so many in float32, of turning the row too
    errors = (lost + own * in_sums) * _ROUNDED_UP
    return whole, scales, (lengths * _ROUNDED_UP).float(), errors.float()
