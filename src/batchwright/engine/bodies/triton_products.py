"""Products of few rows that stream each weight once, as one Triton kernel. Importing this needs Triton.

A decode step reads all weights for a few rows, so memory bandwidth determines its time. The operations between products
are part of them: the norm of their input, SiLU of the gate times up, and the sum with the residual. Where the device
can, a kernel is launched before the one ahead of it ends, and meanwhile fetches its first weights into the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from batchwright.engine.bodies.ops import LayerOps
from batchwright.engine.bodies.weights import LayerWeights, Projection
from batchwright.engine.early_launch import early_launch, launches_early


@triton.jit(do_not_specialize=["rows"])
def stream_product(  # noqa: C901 - the branches are constants, of which a kernel has one each
    out,  # [rows, outputs]; ADDS: what the product is added to
    x,  # [rows, inputs], rows `x_stride` apart
    weight,  # [outputs, inputs]; GATED: [2 · outputs, inputs], gates before ups
    x_blocks,  # DESCRIBED: descriptors of x and weight in blocks of BLOCK_K inputs
    weight_blocks,
    bias,  # [outputs]
    scales,  # SCALED: factors of the outputs, or of gates and ups [2 · outputs], float32
    norm,  # [inputs]
    partial,  # [SPLIT, tiles, BLOCK_N, BLOCK_M] float32
    arrived,  # [tiles] int32, zeros before and after
    rows,
    outputs,
    inputs,
    x_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    NORMS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute BLOCK_N outputs of all rows, or one of SPLIT parts of their sums (split-K). Every block is full."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    span = inputs // (SPLIT * BLOCK_K) * BLOCK_K
    begin = part * span
    there = weight + n[:, None] * inputs
    to_up = outputs.to(tl.int64) * inputs
    if EARLY:
        # Weights never change, so they may be fetched before the kernel ahead has ended; everything else must wait for
        # it.
        lines = begin + tl.arange(0, AHEAD // LINE)[None, :] * LINE
        _fetch(there + lines)
        if GATED:
            _fetch(there + to_up + lines)
        gdc_launch_dependents()
        gdc_wait()

    # One row needs no matrix units, which would multiply it with 15 rows of zeros: it is laid along the inputs.
    ALONE: tl.constexpr = BLOCK_M == 1
    across = k[None, :] if ALONE else k[:, None]
    exists = m[None, :] < rows
    total = tl.zeros([BLOCK_N, BLOCK_K if ALONE else BLOCK_M], tl.float32)
    total_up = total
    squares = tl.zeros([1 if ALONE else BLOCK_K, BLOCK_K if ALONE else BLOCK_M], tl.float32)
    for start in tl.range(begin, begin + span, BLOCK_K, num_stages=STAGES):
        at = there + start + k[None, :]
        if DESCRIBED:
            w = weight_blocks.load([tile * BLOCK_N, start])
            values = tl.trans(x_blocks.load([0, start]))
        else:
            w = tl.load(at)
            values = tl.load(x + m[None, :] * x_stride + start + across, mask=exists, other=0.0)
        if NORMS:
            # The factor of a row is the same for all its values, so it can be applied to the sums.
            wide = values.to(tl.float32)
            squares += wide * wide
            values = (wide * tl.load(norm + start + across).to(tl.float32)).to(x.dtype.element_ty)
        total = _plus(total, w, values, ALONE)
        if GATED:
            up = weight_blocks.load([outputs + tile * BLOCK_N, start]) if DESCRIBED else tl.load(at + to_up)
            total_up = _plus(total_up, up, values, ALONE)
    if ALONE:
        total = tl.sum(total, 1)[:, None]
        total_up = tl.sum(total_up, 1)[:, None]

    done = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(partial + (part * tiles + tile).to(tl.int64) * (BLOCK_N * BLOCK_M) + inner, total)
        tl.debug_barrier()
        done = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if done:
            # The last program adds all parts in order, so that the sum does not depend on which one was last.
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for each in range(SPLIT):
                total += tl.load(partial + (each * tiles + tile).to(tl.int64) * (BLOCK_N * BLOCK_M) + inner)
            tl.store(arrived + tile, 0)
    if done:
        dtype: tl.constexpr = out.dtype.element_ty
        if NORMS:
            factor = tl.rsqrt(tl.sum(squares, 1 if ALONE else 0) / inputs + eps)[None, :]
            total *= factor
            total_up *= factor
        if SCALED:
            total *= tl.load(scales + n)[:, None]
            if GATED:
                total_up *= tl.load(scales + outputs + n)[:, None]
        if BIASED:
            total += tl.load(bias + n).to(tl.float32)[:, None]
        result = total.to(dtype)
        if GATED:
            gate = result.to(tl.float32)
            active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
            result = (active * total_up.to(dtype).to(tl.float32)).to(dtype)
        to = out + m[None, :].to(tl.int64) * outputs + n[:, None]
        if ADDS:
            before = tl.load(to, mask=exists, other=0.0)
            result = (before.to(tl.float32) + result.to(tl.float32)).to(dtype)
        tl.store(to, result, mask=exists)


@triton.jit
def _plus(total, w, values, ALONE: tl.constexpr):
    """Add a block's products to the sums; if ALONE, they are summed over the inputs of a block later."""
    if ALONE:
        total += w.to(tl.float32) * values.to(tl.float32)
    else:
        total = tl.dot(w.to(values.dtype), values, total)
    return total


@triton.jit
def _fetch(at):
    """Fetch the cache lines at these addresses into the second-level cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """How products of up to `rows` rows are cut."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    """How many blocks of inputs are in flight at a time, if there is room for them."""
    warps: int
    norms: bool
    """Whether the norm of the input is computed within the product, rather than before it."""
    described: bool = False
    """Whether blocks are fetched through tensor descriptors, rather than by the addresses of their values."""


BLOCKS = (
    Blocks(rows=1, outputs=8, inputs=1024, stages=4, warps=4, norms=True),
    Blocks(rows=1, outputs=16, inputs=512, stages=5, warps=4, norms=True),
    Blocks(rows=16, outputs=64, inputs=128, stages=5, warps=4, norms=False),
    Blocks(rows=32, outputs=64, inputs=128, stages=4, warps=4, norms=False),
    Blocks(rows=64, outputs=64, inputs=128, stages=3, warps=4, norms=False),
    Blocks(rows=128, outputs=64, inputs=128, stages=4, warps=4, norms=False, described=True),
)
"""Blocks by ascending numbers of rows; for the same number, the fastest first."""
_AHEAD = 16 * 1024
"""Weights of a block that are fetched early."""
_LINE_BYTES = 128
_INPUT_BYTES = 2
_WEIGHTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_MOST_PARTS = 8
_MOST_PROGRAMS = 4
"""Most programs that share a multiprocessor."""
_UNBOUNDED = frozenset({torch.bfloat16})
"""Types in which values that are not normalized yet cannot overflow."""
SHARED_LEFT = 8 * 1024
"""Bytes of shared memory that are left for what a kernel takes besides its blocks."""
_INTERPRETED_SHARED = 1 << 20


def blocks_for(weights: Iterable[Projection]) -> list[Blocks] | str:
    """Return the blocks for these weights, by ascending numbers of rows, or why they cannot be streamed."""
    tensors = [each.weight for each in weights]
    if others := [weight.dtype for weight in tensors if weight.dtype not in _WEIGHTS]:
        return f"weights are {others[0]}"
    chosen: dict[int, Blocks] = {}
    for blocks in BLOCKS:
        over = [
            weight for weight in tensors if weight.shape[0] % (2 * blocks.outputs) or weight.shape[1] % blocks.inputs
        ]
        if not over:
            chosen.setdefault(blocks.rows, blocks)
    if not chosen:
        return f"blocks of {2 * blocks.outputs} by {blocks.inputs} leave a part of a weight {list(over[0].shape)} over"
    return list(chosen.values())


class StreamedProducts:
    """The products of layers for few rows, with weights for which `blocks_for` returned blocks.

    Calls must not overlap: they share memory.
    """

    def __init__(self, blocks: Blocks, device: torch.device, ops: LayerOps, *, processors: int | None = None) -> None:
        """`processors` is the number of multiprocessors to occupy, by default those of `device`."""
        self.rows = blocks.rows
        """Greatest number of rows."""
        self._blocks, self._ops = blocks, ops
        self._processors, self._shared = processors or 1, _INTERPRETED_SHARED
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._processors = processors or int(properties.multi_processor_count)
            shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
            self._shared = int(shared) - SHARED_LEFT
        self._early = launches_early(device)
        self.takes_head = True
        """Whether the logits are computed here too."""
        # Sums are split if there are fewer tiles than programs that run at a time.
        self._arrived = torch.zeros(self._processors * _MOST_PROGRAMS, dtype=torch.int32, device=device)

    def qkv(self, layer: LayerWeights, residual: Tensor, eps: float) -> Tensor:
        """Return q, k and v of the norm of `residual` [rows, hidden] -> [rows, outputs]."""
        return self._normed(residual, layer.input_norm, eps, layer.qkv)

    def finish(self, layer: LayerWeights, residual: Tensor, attended: Tensor, eps: float) -> None:
        """Add to `residual` in place what follows attention in a layer: the output product, and the MLP."""
        self._launch(residual, attended, layer.output, adds=True)
        active = self._normed(residual, layer.post_norm, eps, layer.gate_up, gated=True)
        self._launch(residual, active, layer.down, adds=True)

    def logits(self, head: Projection, residual: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return the logits of `residual` [rows, hidden] -> [rows, vocab]."""
        return self._normed(residual, norm, eps, head)

    def _normed(self, x: Tensor, norm: Tensor, eps: float, projection: Projection, *, gated: bool = False) -> Tensor:
        outputs = projection.weight.shape[0]
        out = x.new_empty((x.shape[0], outputs // 2 if gated else outputs))
        if self._blocks.norms and x.dtype in _UNBOUNDED:
            self._launch(out, x, projection, norm, eps, gated=gated)
        else:
            self._launch(out, self._ops.add_rms_norm(None, x, norm, eps), projection, gated=gated)
        return out

    def _launch(
        self,
        out: Tensor,
        x: Tensor,
        projection: Projection,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        gated: bool = False,
        adds: bool = False,
    ) -> None:
        rows, outputs = out.shape
        if not rows:
            return
        weight, bias, inputs, blocks = projection.weight, projection.bias, x.shape[1], self._blocks
        tiles = outputs // blocks.outputs
        parts = 1 if gated or norm is not None else self._parts(tiles, weight)
        partial = self._arrived
        if parts > 1:
            partial = x.new_empty(parts * outputs * self.rows, dtype=torch.float32)
        with torch.cuda.device_of(x):
            stream_product[(tiles, parts)](
                out,
                x,
                weight,
                self._described(x, self.rows) if blocks.described else x,
                self._described(weight, blocks.outputs) if blocks.described else weight,
                weight if bias is None else bias,
                weight if projection.scales is None else projection.scales,
                weight if norm is None else norm,
                partial,
                self._arrived,
                rows,
                outputs,
                inputs,
                x.stride(0),
                eps,
                BLOCK_M=self.rows,
                BLOCK_N=blocks.outputs,
                BLOCK_K=blocks.inputs,
                SPLIT=parts,
                STAGES=self._stages(weight, gated=gated),
                NORMS=norm is not None,
                GATED=gated,
                ADDS=adds,
                BIASED=bias is not None,
                SCALED=projection.scales is not None,
                DESCRIBED=blocks.described,
                AHEAD=self._ahead(inputs // parts, gated=gated),
                LINE=_LINE_BYTES // weight.itemsize,
                num_warps=blocks.warps,
                **early_launch(self._early),
            )

    def _described(self, matrix: Tensor, rows: int) -> TensorDescriptor:
        """Return a tensor descriptor of `matrix` with blocks of `rows` rows."""
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, self._blocks.inputs])

    def _stages(self, weight: Tensor, *, gated: bool) -> int:
        return max(1, min(self._blocks.stages, self._shared // self._stage_bytes(weight, gated=gated)))

    def _stage_bytes(self, weight: Tensor, *, gated: bool) -> int:
        outputs = self._blocks.outputs * (2 if gated else 1)
        return (self.rows * _INPUT_BYTES + outputs * weight.itemsize) * self._blocks.inputs

    def _ahead(self, inputs: int, *, gated: bool) -> int:
        """Return for how many inputs of each output weights are fetched early: a power of two, at most `inputs`."""
        ahead = _AHEAD // self._blocks.outputs // (2 if gated else 1)
        while ahead > inputs:
            ahead //= 2
        return ahead

    def _parts(self, tiles: int, weight: Tensor) -> int:
        """Return into how many parts sums are split: as many as run at a time with `tiles` blocks of outputs each."""
        used = self._stages(weight, gated=False) * self._stage_bytes(weight, gated=False)
        room = self._processors * min(_MOST_PROGRAMS, max(1, self._shared // used))
        parts, inputs = 1, weight.shape[1]
        while parts < _MOST_PARTS and 2 * parts * tiles <= room and inputs % (2 * parts * self._blocks.inputs) == 0:
            parts *= 2
        return parts
