"""Paged attention over a ragged batch: one interface, five implementations, chosen in `choose_attention`."""

from batchwright.engine.attention.attention import AttentionBackend, AttentionShape, KVShape, LayerCache
from batchwright.engine.attention.choice import choose_attention

__all__ = ["AttentionBackend", "AttentionShape", "KVShape", "LayerCache", "choose_attention"]
