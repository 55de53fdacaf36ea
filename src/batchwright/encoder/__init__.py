"""Sentence embeddings: encoders whose batches are computed without padding."""
