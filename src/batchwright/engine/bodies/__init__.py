"""Model bodies: what turns a step's tokens into logits."""

from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.load import load_body

__all__ = ["ModelBody", "load_body"]
