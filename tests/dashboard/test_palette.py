"""Contrast of every pair of colours that meet, in both themes: WCAG 2.2 AA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchwright.server.dashboard import page

STATIC = Path(page.__file__).parent / "static"
COLOR = r"#[0-9a-f]{6}"
PALETTE = {
    name: (light, dark)
    for name, light, dark in re.findall(
        rf"--([a-z-]+): light-dark\(({COLOR}), ({COLOR})\)", (STATIC / "palette.css").read_text()
    )
}
TEXT = [
    *((front, back) for front in ("text", "quiet") for back in ("page", "card", "sunk", "bad-tint")),
    *((front, "card") for front in ("accent", "bad")),
    ("accent", "busy-tint"),
    *((tone, f"{tone}-tint") for tone in ("good", "warn", "bad")),
    ("on-accent", "accent"),
    ("on-accent", "bad"),
]
SIGNS = [
    *(("edge", back) for back in ("page", "card")),
    *((front, "card") for front in ("accent", "second", "good", "warn", "bad")),
    *((front, back) for front in ("accent", "bad") for back in ("sunk", "line")),
    ("accent", "page"),
]


def luminance(color: str) -> float:
    parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("front", "back", "least"), [*((*pair, 4.5) for pair in TEXT), *((*pair, 3.0) for pair in SIGNS)]
)
def test_contrast(front: str, back: str, least: float, theme: int) -> None:
    assert contrast(PALETTE[front][theme], PALETTE[back][theme]) >= least


def test_no_other_sheet_has_colors_of_its_own() -> None:
    for path in STATIC.glob("*.css"):
        if path.name != "palette.css":
            assert re.findall(r"#[0-9a-f]{3,8}\b|rgba?\(|hsla?\(", path.read_text()) == [], path.name
