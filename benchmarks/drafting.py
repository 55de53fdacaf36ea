"""What guesses from ended answers gain: `.venv/bin/python benchmarks/drafting.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command."""
    # Run by its path, Python looks for modules in this file's folder, not in the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.drafts.cli import app

    app()


if __name__ == "__main__":
    main()
