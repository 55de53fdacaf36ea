"""Durable state of batches: what stands in the database."""
