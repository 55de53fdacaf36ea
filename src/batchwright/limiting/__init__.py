"""How much is let in, and of whom: pure decisions, which are told the time."""
