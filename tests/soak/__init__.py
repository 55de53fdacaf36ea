"""The service for hours at mixed load, with a fault every minute: `python -m tests.soak --help`."""
