"""Tasks of lm-evaluation-harness, with its own `hf` model and through the engine."""
