"""Decisions about a provider's batches: what goes into each, when it is handed over, looked at, and given up. Pure."""
