"""The engine on one GPU, compared with its measured bandwidth and products: the parts of `benchmarks/gpu.py`."""
