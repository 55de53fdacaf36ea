"""The worker: claims lines of batches, computes them, commits results and builds output files."""
