"""Batches from the point of view of their owners: creation, progress and results."""
