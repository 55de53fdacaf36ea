"""A small file of prompts, from the command to the first answer: the pieces behind `benchmarks/start.py`."""
