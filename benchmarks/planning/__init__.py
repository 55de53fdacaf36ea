"""Steps of the engine around a model that computes nothing: the pieces behind `benchmarks/scheduling.py`."""
