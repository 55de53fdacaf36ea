"""Batches from upload to output file: blobs, intake, workers, finishing, progress."""
