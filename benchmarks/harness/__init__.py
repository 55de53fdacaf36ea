"""Tasks of lm-evaluation-harness, by its own `hf` model and through the engine."""
