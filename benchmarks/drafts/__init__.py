"""Jobs computed with and without guesses from ended answers: the pieces behind `benchmarks/drafting.py`."""
