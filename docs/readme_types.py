"""Strict types of the README's examples in Python: `python docs/readme_types.py`, which `make types` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pictures.document import blocks

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Return the exit status of mypy for the examples, each of which is a module of its own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = [block.body for block in blocks(text) if block.language == "python"]
    with TemporaryDirectory() as folder:
        for number, example in enumerate(examples):
            (Path(folder) / f"example_{number}.py").write_text(example, encoding="utf-8")
        # With the options of the other modules, so that mypy takes what it knows of the package from its cache.
        command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", folder]
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
