"""Clients, each of which runs in an environment of its own: `python -m benchmarks.provider.systems.NAME TASK`."""
