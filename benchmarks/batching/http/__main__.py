"""`python -m benchmarks.batching.http --help`."""

from benchmarks.batching.http.cli import app

app()
