"""One module for each system. Each runs in an environment of its own: standard library and the system, nothing else."""
