"""Rows of a Ray dataset through batchwright and through vLLM, beside the same rows in a file."""
