"""Clients of other languages."""
