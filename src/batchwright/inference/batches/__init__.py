"""Calls computed by a provider's own batch API."""
