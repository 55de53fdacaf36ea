"""The systems under measurement, each run as a separate process by its own Python.

A worker imports nothing of batchwright's but what it measures, so that it runs in a peer's environment too.
"""
