"""Limits on what clients may use: pure decisions, which are told the time."""
