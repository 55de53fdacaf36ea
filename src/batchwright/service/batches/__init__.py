"""Batches as their owners see them: creation, progress, results."""
