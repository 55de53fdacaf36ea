"""Batching servers compared over HTTP, in real time."""
