"""Durable state of batches: what stands in the database."""

from batchwright.jobs.store.interface import Store
from batchwright.jobs.store.opening import open_store, shown_url, store_exists

__all__ = ["Store", "open_store", "shown_url", "store_exists"]
