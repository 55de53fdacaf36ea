"""How much is let in: pure decisions about capacity, without a clock, I/O or threads."""
