"""Texts embedded per second: batchwright, sentence-transformers and infinity-emb."""
