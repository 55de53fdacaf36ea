"""Paged attention over a ragged batch: one interface, four implementations, chosen in `choose_attention`."""

from batchwright.engine.attention.choice import choose_attention
from batchwright.engine.attention.interface import AttentionBackend, AttentionShape, KVShape, LayerCache

__all__ = ["AttentionBackend", "AttentionShape", "KVShape", "LayerCache", "choose_attention"]
