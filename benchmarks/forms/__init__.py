"""Answers of a given form through batchwright and through vLLM, and the libraries that compute their masks."""
