"""Figures of several runs, kept as JSON, and the page made of them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from benchmarks.attacks.attack import Attack, Figure
from benchmarks.throughput.report import machine, table

BEFORE, AFTER = "before", "after"
Findings: TypeAlias = dict[str, dict[str, Any]]
"""By section and column: `{"date", "machine", "figures"}`, or `{"failed"}` for a section that did not end."""

_INTRODUCTION = """\
Attacks on `batchwright serve` over loopback, by `benchmarks/hostile.py`. "After" is the service of this repository, \
"before" the same attack on {before}. A quiet client asks `/health` ten times a second meanwhile, each time over a \
new connection; what it feels is what the attack does to others. Attacker, service and quiet client share \
{cores} cores ({processor})."""


def load(path: Path) -> Findings:
    """Findings of earlier runs; empty if there were none."""
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=Findings)


def save(path: Path, findings: Findings) -> None:
    """Save the findings for later runs of other sections."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(findings, order="sorted"), indent=1) + b"\n")


def entry(figures: Sequence[Figure], source: str) -> dict[str, Any]:
    """Findings of one run of a section with the code `source`."""
    today = f"{dt.datetime.now(dt.UTC):%Y-%m-%d}"
    return {"date": today, "source": source, "figures": [msgspec.to_builtins(each) for each in figures]}


def page(attacks: Sequence[Attack], findings: Findings) -> str:
    """The Markdown page of all sections that have been run."""
    host = machine()
    sources = {column[BEFORE]["source"] for column in findings.values() if BEFORE in column}
    before = "that of " + ", ".join(f"`{each}`" for each in sorted(sources)) if sources else "an older one"
    introduction = _INTRODUCTION.format(before=before, cores=host["cores"], processor=host["processor"])
    parts = ["# The service under hostile hands", introduction]
    for attack in attacks:
        if attack.name in findings:
            parts += [f"## {attack.title}", attack.text, _table(findings[attack.name])]
    return "\n\n".join(parts) + "\n"


def _table(columns: Mapping[str, Any]) -> str:
    dates = [f"{name} ({columns[name]['date']})" for name in (BEFORE, AFTER) if name in columns]
    figures = {name: _figures(columns[name]) for name in (BEFORE, AFTER) if name in columns}
    names = list(dict.fromkeys(each.name for found in figures.values() for each in found.values()))
    rows = []
    for name in names:
        cells = [_cell(found.get(name)) for found in figures.values()]
        known = next((found[name] for found in reversed(figures.values()) if name in found), None)
        rows.append(
            [name, *cells, "" if known is None or known.most is None else f"≤ {_value(known.most, known.unit)}"]
        )
    return table(["", *dates, "bar"], rows)


def _figures(column: Mapping[str, Any]) -> dict[str, Figure]:
    found = [msgspec.convert(each, Figure) for each in column["figures"]]
    return {each.name: each for each in found}


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    shown = "none" if figure.value is None else _value(figure.value, figure.unit)
    return f"**{shown}**" if figure.missed else shown


def _value(value: float, unit: str) -> str:
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".strip()
