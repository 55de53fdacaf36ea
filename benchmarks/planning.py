"""Sections of the planning benchmark: `.venv/bin/python benchmarks/planning.py --section twin --help`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

SECTIONS = ("twin",)


def main() -> None:
    """Run the command of a section, with the arguments after its name."""
    # Run by its path, Python looks for modules in this file's folder, not in the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    arguments = sys.argv[1:]
    if len(arguments) < 2 or arguments[0] != "--section" or arguments[1] not in SECTIONS:
        sys.exit(f"usage: benchmarks/planning.py --section {{{','.join(SECTIONS)}}} [options]")
    sys.argv[1:] = arguments[2:]
    import_module(f"benchmarks.planning.{arguments[1]}").app()


if __name__ == "__main__":
    main()
