"""Draw the pictures of docs/batching.md, and write the output of its examples: `python docs/pictures/draw.py`.

With names (`python docs/pictures/draw.py simple auto`) only those are drawn, and the document is left as it is. `--to`
names another folder. The same package versions give the same bytes. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run the command."""
    # Run by its path, Python looks for modules in this file's folder, not in the one above it.
    sys.path.insert(0, str(FOLDER.parent))
    from pictures.catalogue import PICTURES
    from pictures.drawing.saving import save

    parser = argparse.ArgumentParser(description="Draw the pictures of docs/batching.md and write its output.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(PICTURES)}; all without any")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER", help="where to write pictures")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(PICTURES))
    if unknown:
        parser.error(f"no picture {unknown[0]!r}: choose from {', '.join(PICTURES)}")
    for name in chosen.names or PICTURES:
        save(PICTURES[name](), chosen.to / f"{name}.svg")
    if not chosen.names:
        from pictures.document import renew

        renew(FOLDER.parent / "batching.md")


if __name__ == "__main__":
    main()
