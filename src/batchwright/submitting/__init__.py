"""Decisions about a provider's batches: what goes into each, when it is submitted, looked at, and given up. Pure."""
