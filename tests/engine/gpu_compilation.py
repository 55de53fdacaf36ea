"""Compiles the Triton kernels for a GPU that need not be here: `python -m tests.engine.gpu_compilation 90`.

With `ends` as a second argument, streamed products are compiled for the fewest rows and the most, not for all between.
Prints each kernel with the bytes of shared memory that it takes. Triton must not be told to interpret.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from batchwright.engine.attention import AttentionShape, KVShape, tiled
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.attention.tiled import TritonAttention
from batchwright.engine.attention.trial import trial_batch
from batchwright.engine.bodies import triton_ops, triton_products
from batchwright.engine.bodies.linear import FP8_CAPABILITY
from batchwright.engine.bodies.ops import HeadShape, everything
from batchwright.engine.bodies.triton_ops import FusedOps, round_rows
from batchwright.engine.bodies.triton_products import BLOCKS, Blocks, StreamedProducts
from batchwright.engine.bodies.weights import LayerWeights, Projection
from batchwright.engine.triton_maxima import row_maxima

CPU = torch.device("cpu")
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a program can have, by compute capability."""

EARLY = 90
"""First compute capability on which kernels are launched early."""


class Absent:
    """A driver for a GPU of compute capability `capability` / 10, which nothing can be launched on."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    capability = int(sys.argv[1])
    cuts = (BLOCKS[0], BLOCKS[-1]) if sys.argv[2:] == ["ends"] else BLOCKS
    triton.runtime.driver.set_active(Absent(capability))
    for module in (tiled, triton_ops):
        vars(module)["launches_early"] = lambda device: capability >= EARLY
    run = JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        print(kernel.__name__, made.metadata.shared)
        return made

    JITFunction.run = compiled
    heads = HeadShape(8, 2, 128)
    batch, blocks = trial_batch(16, CPU)
    cache = ReferenceAttention().allocate(KVShape(blocks, 16, heads.kv_heads, heads.head_dim, torch.bfloat16, CPU))
    query = torch.empty(batch.num_tokens, heads.heads * heads.head_dim, dtype=torch.bfloat16)
    for few in (True, False):
        TritonAttention(few=few).attend(query, cache, AttentionShape(heads.heads, 0.1), batch)
    decodes, blocks = trial_batch(16, CPU, decodes=True)
    cache = ReferenceAttention().allocate(KVShape(blocks, 16, heads.kv_heads, heads.head_dim, torch.bfloat16, CPU))
    TritonAttention().attend(query[: decodes.num_tokens], cache, AttentionShape(heads.heads, 0.1), decodes)
    everything(FusedOps(), heads, 512, torch.bfloat16, CPU)
    for cut in cuts:
        stream(cut, capability)
    if capability >= 10 * FP8_CAPABILITY[0] + FP8_CAPABILITY[1]:
        for cut in cuts:
            stream(cut, capability, torch.float8_e4m3fn)
        round_rows(torch.empty(2, 14336, dtype=torch.bfloat16))
    row_maxima(torch.empty(2, 9000, dtype=torch.bfloat16))


def stream(blocks: Blocks, capability: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compute a layer with weights of `dtype` whose products are cut in every way."""
    products = StreamedProducts(blocks, CPU, FusedOps(), processors=132)
    products._early, products._shared = capability >= EARLY, SHARED[capability] - triton_products.SHARED_LEFT

    def empty(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.bfloat16)

    def projection(outputs: int, inputs: int, bias: Tensor | None = None) -> Projection:
        scales = torch.empty(outputs) if dtype is torch.float8_e4m3fn else None
        return Projection(torch.empty(outputs, inputs, dtype=dtype), bias, scales)

    layer = LayerWeights(
        input_norm=empty(1024),
        qkv=projection(18 * 1024, 1024, empty(18 * 1024)),
        query_norm=None,
        key_norm=None,
        output=projection(1024, 1024),
        post_norm=empty(1024),
        gate_up=projection(4096, 1024),
        down=projection(1024, 2048),
        window=None,
    )
    residual = empty(blocks.rows, 1024)
    products.qkv(layer, residual, 1e-5)
    products.finish(layer, residual, residual.clone(), 1e-5)


if __name__ == "__main__":
    main()
