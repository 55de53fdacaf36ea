"""The worker: it claims lines of batches, computes them, commits the results and builds output files."""
