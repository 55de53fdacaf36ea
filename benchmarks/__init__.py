"""Measurements of batchwright against its peers. Not part of the package; run from a checkout."""
