"""Generated tokens per second of whole jobs: the pieces behind `benchmarks/engine.py`."""
