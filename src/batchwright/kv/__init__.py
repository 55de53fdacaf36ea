"""Management of the memory for each sequence's keys and values: blocks, reference counts, prefix cache."""

from batchwright.kv.blocks import BlockManager, BlockTable

__all__ = ["BlockManager", "BlockTable"]
