"""Everything behind a server or a worker: batches, workers, files, keys, webhooks, settings and metrics."""
