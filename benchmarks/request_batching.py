"""Request-level batching against its peers: `.venv/bin/python benchmarks/request_batching.py --help`, README.md.

With `--http`, the servers over HTTP instead of the libraries in process; the other options are then those of that.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command."""
    # Run by its path, Python looks for modules in this file's folder, not in the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    arguments = sys.argv[1:]
    if "--http" in arguments:
        from benchmarks.batching.http.cli import app
    else:
        from benchmarks.batching.cli import app

    app([argument for argument in arguments if argument != "--http"])


if __name__ == "__main__":
    main()
