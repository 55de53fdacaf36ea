"""Weights of a GGUF file as the numbers in the file: 4 or 8 bits, with a scale for each 32 inputs.

Q4_0, Q4_1, Q4_K and Q8_0 are kept exactly, except for the scales of Q4_K, which are products rounded to float16.
Formats with other numbers of bits are rounded to 8. The order of bytes is that of ggml-common.h and ggml-quants.c in
llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
"""Architectures, in GGUF's names, whose layers have the weights in `WEIGHTS`, and that multiply numbers."""
WEIGHTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names in a layer of the weights that are kept as numbers, and what GGUF calls them."""
GROUP = 32
"""Inputs that share a scale."""
_OF_K = 256
"""Weights of a block of Q4_K, in 8 groups."""
_NOT_QUANTIZED = frozenset({"F32", "F16", "BF16"})
_OF_4_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
_ROWS_CHECKED = 256
_MOST_ERROR = 0.02
"""Greatest error of values rounded to bfloat16, relative to the greatest magnitude in their row."""
_LEVELS = 127

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A weight: (numbers - 128) · scale with 8 bits, numbers · scale + offset with 4."""

    numbers: _Bytes
    """[outputs, inputs]."""
    scales: _Halves
    """[outputs, groups], as are `offsets`."""
    offsets: _Halves | None
    """None with 8 bits."""

    @property
    def bits(self) -> int:
        return 8 if self.offsets is None else 4

    def values(self, rows: slice = slice(None)) -> _Floats:
        """Return some rows of the weight: [rows, inputs]."""
        scales = self.scales[rows].astype(np.float32)[..., None]
        groups = self.numbers[rows].astype(np.float32).reshape(*self.scales[rows].shape, GROUP)
        if self.offsets is None:
            found = (groups - 128) * scales
        else:
            found = groups * scales + self.offsets[rows].astype(np.float32)[..., None]
        return found.reshape(len(groups), -1).astype(np.float32)

    def ordered(self, rows: npt.NDArray[np.int64]) -> Numbers:
        """Return the weight with its rows in another order."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return Numbers(self.numbers[rows], self.scales[rows], offsets)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Return the stored tensors by their suffixes; two numbers of 4 bits are a byte, the first one low."""
        if self.offsets is None:
            return {"numbers": self.numbers, "scales": self.scales}
        packed = self.numbers[:, ::2] | self.numbers[:, 1::2] << 4
        return {"numbers": packed, "scales": self.scales, "offsets": self.offsets}


class Stored(NamedTuple):
    """A tensor of a file: its name, its format, and its number of values."""

    name: str
    kind: str
    values: int


def bytes_needed(tensors: Sequence[Stored], bytes_each: int, *, as_numbers: bool) -> int:
    """Return the bytes that the weights of a file take on disk while they are converted.

    They are first written as values of `bytes_each`; with `as_numbers`, then again as numbers.
    """
    values = bytes_each * sum(each.values for each in tensors)
    return values + sum(_bytes_beside(each, bytes_each) for each in tensors) if as_numbers else values


def _bytes_beside(tensor: Stored, bytes_each: int) -> int:
    found = re.fullmatch(r"blk\.\d+\.(.+)\.weight", tensor.name)
    if found is None or found[1] not in WEIGHTS.values() or tensor.kind in _NOT_QUANTIZED:
        return bytes_each * tensor.values
    # Two or four bytes of scales and offsets for each group.
    return tensor.values // GROUP * (GROUP // 2 + 4 if tensor.kind in _OF_4_BITS else GROUP + 2)


def numbers_of(data: _Bytes, kind: str, values: _Floats, heads: int | None) -> Numbers | None:
    """Return the numbers of a weight, whose `values` [outputs, inputs] are known up to rounding to bfloat16.

    - `data`: its bytes in the file, in the format `kind`. `heads`: number of heads of queries or keys whose rows may be
      in pairs, as llama.cpp rotates them, rather than halves.
    - None if the weight is not quantized, its inputs are not divisible by 32, or the numbers are not those of `values`.
    """
    if kind in _NOT_QUANTIZED or values.shape[1] % GROUP:
        return None
    read = _EXACT.get(kind)
    if read is None:
        return rounded(values)
    found = read(data.reshape(len(values), -1))
    if _agrees(found, values):
        return found
    if heads is not None and _agrees(halved := found.ordered(_halves_first(len(values), heads)), values):
        return halved
    return None


def rounded(values: _Floats) -> Numbers:
    """Return `values` rounded to 8 bits: the greatest magnitude of a group becomes ±127."""
    groups = values.astype(np.float32).reshape(len(values), -1, GROUP)
    scales = (np.abs(groups).max(axis=2) / _LEVELS).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    numbers = np.divide(groups, wide, out=np.zeros_like(groups), where=wide > 0)
    whole = np.clip(np.rint(numbers), -_LEVELS, _LEVELS) + 128
    return Numbers(whole.astype(np.uint8).reshape(values.shape), scales, None)


def _agrees(found: Numbers, values: _Floats) -> bool:
    rows = slice(0, _ROWS_CHECKED)
    errors = np.abs(found.values(rows) - values[rows]).max(axis=1)
    return bool((errors <= _MOST_ERROR * np.abs(values[rows]).max(axis=1)).all())


def _halves_first(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return the order of rows that turns each head's pairs into halves."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _q8_0(data: _Bytes) -> Numbers:
    blocks = data.reshape(len(data), -1, 2 + GROUP)
    numbers = blocks[:, :, 2:].view(np.int8).astype(np.int16) + 128
    return Numbers(numbers.astype(np.uint8).reshape(len(data), -1), _half(blocks[:, :, :2]), None)


def _q4_0(data: _Bytes) -> Numbers:
    blocks = data.reshape(len(data), -1, 2 + GROUP // 2)
    scales = _half(blocks[:, :, :2])
    return Numbers(_nibbles(blocks[:, :, 2:]), scales, -8 * scales)


def _q4_1(data: _Bytes) -> Numbers:
    blocks = data.reshape(len(data), -1, 4 + GROUP // 2)
    return Numbers(_nibbles(blocks[:, :, 4:]), _half(blocks[:, :, :2]), _half(blocks[:, :, 2:4]))


def _q4_k(data: _Bytes) -> Numbers:
    blocks = data.reshape(len(data), -1, 4 + 12 + _OF_K // 2)
    packed = blocks[:, :, 4:16]
    low, high, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    # They have 6 bits each; two bits of each of the last four groups are stored beside those of the first four.
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=2).astype(np.float32)
    least = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=2).astype(np.float32)
    scale = scales * _half(blocks[:, :, :2]).astype(np.float32)[..., None]
    offset = least * _half(blocks[:, :, 2:4]).astype(np.float32)[..., None]
    shape = (len(data), -1)
    return Numbers(
        _nibbles(blocks[:, :, 16:].reshape(len(data), -1, GROUP)),
        scale.reshape(shape).astype(np.float16),
        -offset.reshape(shape).astype(np.float16),
    )


def _half(data: _Bytes) -> _Halves:
    """Return the float16 in each two bytes [rows, blocks, 2]."""
    return np.ascontiguousarray(data).view(np.float16)[..., 0]


def _nibbles(data: _Bytes) -> _Bytes:
    """Return the lower halves of the bytes of each block, and then the upper ones: [rows, numbers]."""
    return np.concatenate([data & 15, data >> 4], axis=2).reshape(len(data), -1)


_EXACT: Mapping[str, Callable[[_Bytes], Numbers]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
