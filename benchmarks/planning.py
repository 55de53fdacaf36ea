"""Jobs that are known before they start: `.venv/bin/python benchmarks/planning.py --help`.

`--section bounds`, `times` and `twin` have a help of their own: `benchmarks/planning.py --section twin --help`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

_APART = {
    "bounds": "benchmarks.planning.bounds",
    "times": "benchmarks.planning.times",
    "twin": "benchmarks.planning.twin",
}
"""Sections that are commands of their own, with options of their own."""


def main() -> None:
    """Run the command."""
    # Run by its path, Python looks for modules in this file's folder, not in the one above it.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    name = "benchmarks.foresight.cli"
    if sys.argv[1:2] == ["--section"] and (apart := _APART.get("".join(sys.argv[2:3]))) is not None:
        name = apart
        del sys.argv[1:3]
    import_module(name).app()


if __name__ == "__main__":
    main()
