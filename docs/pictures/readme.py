"""Make the two pictures of README.md: `python docs/pictures/readme.py`, some seconds.

`terminal.svg` is what two real commands print with the default model. `speed.svg` has figures from the tables in
benchmarks/results.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 100
COMMANDS = (
    "batchwright run prompts.csv -o adverts.csv --chat --max-tokens 24 --temperature 0 \\\n"
    "    --prompt-template 'Advertise a {product} that {feature}.'",
    "batchwright show adverts.csv -n 2",
)
_END_OF_LIVE_VIEW = "\x1b[?25h"
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-Zhl]|\r")
"""Control sequences but for colours."""


def terminal(path: Path) -> None:
    """Draw what the commands print."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompts.csv").write_bytes((ROOT / "examples" / "prompts.csv").read_bytes())
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
            environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
            ran = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=True
            )
            # The bar goes away when it is done: what stays is after it.
            stays = _CURSOR.sub("", ran.stderr.rpartition(_END_OF_LIVE_VIEW)[2]).lstrip()
            console.print(Text.from_ansi(stays + ran.stdout))
    path.write_text(console.export_svg(title="batchwright", unique_id="terminal"), encoding="utf-8")


class Bar(NamedTuple):
    """A figure: how many times as fast as `peer`."""

    what: str
    peer: str
    ratio: float


def ratio(page: str, row: str, column: str) -> float:
    """The ratio in a table of benchmarks/results."""
    header: list[str] = []
    for line in (RESULTS / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if column in cells and not header:
            header = cells
        elif header and line.startswith(f"| {row}"):
            found = re.match(r"[\d.]+", cells[header.index(column)])
            assert found is not None, line
            return float(found[0])
    raise LookupError(f"{page} has no row {row!r} with {column!r}")


def speed(path: Path) -> None:
    """Draw the three figures as bars beside their peers'."""
    bars = (
        Bar("64 sequences, bfloat16", "vLLM, bfloat16", ratio("engine-cpu.md", "uniform-64", "vs vLLM")),
        Bar("64 sequences, int8", "OpenVINO, int8", ratio("engine-cpu-int8.md", "uniform-64", "vs OpenVINO")),
        Bar("embeddings, float32", "sentence-transformers", ratio("embeddings.md", "mix", "vs sentence-transformers")),
    )
    height, unit, left = 44, 150, 190
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height * len(bars) + 10}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{'; '.join(f'{bar.what}: {bar.ratio} times {bar.peer}' for bar in bars)}</title>",
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for index, bar in enumerate(bars):
        top = index * height + 8
        lines += [
            f'<text x="{left - 8}" y="{top + 20}" text-anchor="end" fill="#222">{bar.what}</text>',
            f'<rect x="{left}" y="{top}" width="{bar.ratio * unit:.0f}" height="16" fill="#2563eb"/>',
            f'<text x="{left + bar.ratio * unit + 6:.0f}" y="{top + 13}" fill="#222">{bar.ratio:.2f} times</text>',
            f'<rect x="{left}" y="{top + 18}" width="{unit}" height="12" fill="#b8b8b8"/>',
            f'<text x="{left + unit + 6}" y="{top + 28}" fill="#666" font-size="11">{bar.peer}</text>',
        ]
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    speed(FOLDER / "speed.svg")
    terminal(FOLDER / "terminal.svg")
