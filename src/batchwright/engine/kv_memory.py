"""How much memory the KV cache gets."""

from __future__ import annotations

import torch

from batchwright.engine.attention import KVShape
from batchwright.engine_config import parse_bytes

_CPU_SHARE = 0.25
_CPU_MOST = 4 * 2**30
_GPU_SHARE = 0.85


def num_kv_blocks(layers: list[KVShape], kv_memory: str | int | None, most_blocks: int) -> int:
    """Blocks that fit `kv_memory` (None: a share of what is free now), at most `most_blocks`.

    `layers` are the caches of all layers, of any number of blocks. Raises ValueError when not even one block fits,
    or when more is asked for than is free.
    """
    per_block = sum(layer.bytes_per_block for layer in layers)
    budget = _free_share(layers[0].device) if kv_memory is None else parse_bytes(kv_memory)
    wanted = min(budget, most_blocks * per_block)
    if kv_memory is not None and wanted > (free := _free(layers[0].device)):
        raise ValueError(
            f"kv_memory={kv_memory!r}: {wanted / 2**30:.1f} GiB would be taken and {free / 2**30:.1f} GiB are free; "
            "give less"
        )
    if budget < per_block:
        raise ValueError(f"kv_memory={kv_memory!r}: one KV block of this model takes {per_block} bytes; give more")
    return min(budget // per_block, most_blocks)


def _free_share(device: torch.device) -> int:
    if device.type == "cuda":
        return int(_free(device) * _GPU_SHARE)
    return min(_CPU_MOST, int(_free(device) * _CPU_SHARE))


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)
