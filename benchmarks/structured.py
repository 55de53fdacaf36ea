"""Answers of a given form against free text and against vLLM: `.venv/bin/python benchmarks/structured.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command."""
    # Run by its path, Python looks for modules in this file's folder, not in the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import typer

    from benchmarks.forms.cli import structured

    typer.run(structured)


if __name__ == "__main__":
    main()
