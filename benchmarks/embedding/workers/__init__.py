"""One module for each system. Each runs in its own environment: standard library and the system, nothing else."""
