"""Sizes of an engine, from its options and its device, and the resulting scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.engine_config import DEFAULT_MAX_NUM_SEQS, EngineConfig, parse_bytes
from batchwright.kv import BlockManager
from batchwright.scheduling.scheduler import Scheduler
from batchwright.scheduling.slo import SloController

BLOCK_SIZE = 16
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_CPU_SHARE = 0.25
_CPU_MOST = 4 * 2**30
_GPU_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How much an engine holds and computes at once."""

    max_batch_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    """Blocks of the KV cache, of `BLOCK_SIZE` tokens."""

    @classmethod
    def of(
        cls, config: EngineConfig, *, device: str, block_bytes: int, free_bytes: int, max_model_len: int
    ) -> EngineSizes:
        """Return the sizes on a kind of device (cpu, cuda) with `free_bytes` of memory.

        `block_bytes`: bytes of a block of the KV cache over all layers. Raises ValueError for an option that does not
        fit the model or the memory.
        """
        length = max_model_len if config.max_model_len is None else config.max_model_len
        if length > max_model_len:
            raise ValueError(f"max_model_len={length}: this model takes {max_model_len} tokens at most")
        num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        most_blocks = num_seqs * -(-length // BLOCK_SIZE)
        return cls(
            max_batch_tokens=config.max_batch_tokens or _BATCH_TOKENS.get(device, 512),
            max_num_seqs=num_seqs,
            max_model_len=length,
            num_blocks=_num_blocks(config.kv_memory, device, block_bytes, free_bytes, most_blocks),
        )

    def scheduler(self, config: EngineConfig, *, draft_rows: int = 0, max_scored: int = 512) -> Scheduler:
        """Return a scheduler for an engine of this size; `draft_rows` and `max_scored` are as in `Scheduler`."""
        return Scheduler(
            BlockManager(self.num_blocks, BLOCK_SIZE, prefix_caching=config.prefix_caching),
            max_batch_tokens=self.max_batch_tokens,
            max_num_seqs=self.max_num_seqs,
            promote_after=config.promote_after,
            batch_share=config.batch_share,
            draft_rows=draft_rows,
            max_scored=max_scored,
            slo=SloController(ttft=_seconds(config.ttft_ms), tpot=_seconds(config.tpot_ms)),
        )


def _num_blocks(kv_memory: str | int | None, device: str, block_bytes: int, free: int, most_blocks: int) -> int:
    """Return how many blocks fit `kv_memory` (None: a share of the `free` bytes), at most `most_blocks`.

    Raises ValueError if not even one block fits, or if more memory is wanted than is free.
    """
    if kv_memory is not None:
        budget = parse_bytes(kv_memory)
    elif device == "cuda":
        budget = int(free * _GPU_SHARE)
    else:
        budget = min(_CPU_MOST, int(free * _CPU_SHARE))
    wanted = min(budget, most_blocks * block_bytes)
    if kv_memory is not None and wanted > free:
        raise ValueError(
            f"kv_memory={kv_memory!r}: {wanted / 2**30:.1f} GiB would be taken and {free / 2**30:.1f} GiB are free; "
            "give less"
        )
    if budget < block_bytes:
        raise ValueError(f"kv_memory={kv_memory!r}: one KV block of this model takes {block_bytes} bytes; give more")
    return min(budget // block_bytes, most_blocks)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
