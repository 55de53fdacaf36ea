"""Decisions about where each sequence's keys and values are stored: blocks, reference counts, prefix cache."""

from batchwright.kv.blocks import BlockManager, BlockTable

__all__ = ["BlockManager", "BlockTable"]
