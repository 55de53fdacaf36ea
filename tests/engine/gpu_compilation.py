"""Compiles the Triton kernels for a GPU that need not be here: `python -m tests.engine.gpu_compilation 90`.

Prints each kernel with the bytes of shared memory that it takes. Triton must not be told to interpret.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from batchwright.engine.attention import AttentionShape, KVShape
from batchwright.engine.attention.paged import ReferenceAttention
from batchwright.engine.attention.tiled import TritonAttention
from batchwright.engine.attention.trial import trial_batch
from batchwright.engine.bodies.ops import HeadShape, everything
from batchwright.engine.bodies.triton_ops import FusedOps

CPU = torch.device("cpu")


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
    triton.runtime.driver.set_active(Absent(int(sys.argv[1])))
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
    TritonAttention().attend(query, cache, AttentionShape(heads.heads, 0.1), batch)
    everything(FusedOps(), heads, 512, torch.bfloat16, CPU)


if __name__ == "__main__":
    main()
