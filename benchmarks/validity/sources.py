"""Folders of schemas, as JSONSchemaBench and JSON-Schema-Test-Suite have them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """Schemas of one folder, or a sample of them."""

    name: str
    total: int
    schemas: list[tuple[str, dict[str, Any]]]
    """Names and schemas."""
    left_out: int
    """Schemas that are not objects, which no request can use, and files that are not JSON."""


def read_source(folder: Path, most: int, seed: int) -> Source:
    """Return the schemas of all files in `folder` and below it, at most `most` of them, drawn by `seed`."""
    found: list[tuple[str, dict[str, Any]]] = []
    left_out = 0
    for path in sorted(folder.rglob("*.json")):
        try:
            for name, schema in _schemas(path.relative_to(folder).with_suffix("").as_posix(), path):
                if isinstance(schema, dict):
                    found.append((name, schema))
                else:
                    left_out += 1
        except ValueError:
            left_out += 1
    drawn = found if len(found) <= most else random.Random(seed).sample(found, most)
    return Source(folder.name, len(found), drawn, left_out)


def _schemas(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the schema of a file, or those of its cases."""
    read = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(read, list):
        yield from ((f"{name} #{number}", case.get("schema")) for number, case in enumerate(read))
    else:
        yield name, read
