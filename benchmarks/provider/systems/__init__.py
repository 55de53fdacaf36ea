"""Clients, each of which runs in its own environment: `python -m benchmarks.provider.systems.NAME TASK`."""
