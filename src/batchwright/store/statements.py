"""The SQL of the store, read from `sql/`.

Statements stand under `-- name:` lines in files by subject, written for SQLite. `sql/postgresql.sql` has those again
that PostgreSQL needs in another form. `{name}` stands for the text of another entry.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Literal, TypeAlias

Dialect: TypeAlias = Literal["sqlite", "postgresql"]

_SUBJECTS = (
    "files", "batches", "lines", "shares", "suspects", "removal", "workers", "outbox", "keys", "identity", "quotas",
)  # fmt: skip
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"--.*$", re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)\}")
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")


def _folder() -> Traversable:
    return files("batchwright.store") / "sql"


def _entries(name: str) -> dict[str, str]:
    _, *parts = _NAME.split((_folder() / f"{name}.sql").read_text("utf-8"))
    return {
        name: _COMMENT.sub("", text).strip().removesuffix(";")
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


@cache
def statements(dialect: Dialect) -> dict[str, str]:
    """Return all statements by name, with parameters in the style of `dialect`."""
    found: dict[str, str] = {}
    for subject in _SUBJECTS:
        found |= _entries(subject)
    if dialect == "postgresql":
        found |= _entries("postgresql")
    found = {name: _PLACE.sub(lambda place: found[place[1]], text) for name, text in found.items()}
    if dialect == "postgresql":
        found = {name: _PARAMETER.sub(r"%(\1)s", text) for name, text in found.items()}
    return found


def migrations(dialect: Dialect) -> list[str]:
    """Return the scripts that make the schema, in order; the n-th one leads to version n."""
    scripts = (_folder() / "migrations" / dialect).iterdir()
    return [script.read_text("utf-8") for script in sorted(scripts, key=lambda script: script.name)]
