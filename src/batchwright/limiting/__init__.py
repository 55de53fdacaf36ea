"""Limits on which requests are admitted, and from whom: pure decisions, with the time as an argument."""
