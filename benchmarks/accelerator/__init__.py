"""The engine on one GPU, held against its measured bandwidth and products: the pieces behind `benchmarks/gpu.py`."""
