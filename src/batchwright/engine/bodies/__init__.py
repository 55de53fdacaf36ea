"""Model bodies, which compute the logits of a step's tokens."""

from batchwright.engine.bodies.body import ModelBody
from batchwright.engine.bodies.load import load_body

__all__ = ["ModelBody", "load_body"]
