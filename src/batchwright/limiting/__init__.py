"""Limits on what is let in, and from whom: pure decisions, which are given the time."""
