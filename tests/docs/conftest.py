"""What makes the pictures and the output of the documents is not installed: it is imported from the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
