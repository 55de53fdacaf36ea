"""Durable state of batches, in a database."""

from batchwright.store.opening import open_store, shown_url, store_exists
from batchwright.store.store import Store

__all__ = ["Store", "open_store", "shown_url", "store_exists"]
