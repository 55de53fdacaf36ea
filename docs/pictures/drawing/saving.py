"""Pictures as files."""

from __future__ import annotations

import io
import re
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

_LONG = re.compile(r"\d+\.\d{3,}")


def save(drawn: Figure, path: Path) -> None:
    """Write a picture as SVG: the same bytes each time, without the date and the version of matplotlib."""
    written = io.StringIO()
    drawn.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(drawn)
    # Two decimals of a point are more than any screen shows.
    short = _LONG.sub(lambda number: f"{float(number[0]):.2f}", written.getvalue())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line.rstrip()}\n" for line in short.splitlines()), encoding="utf-8")
