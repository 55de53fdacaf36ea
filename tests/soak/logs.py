"""What a service's log comes to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SHOWN = 5
_LONGEST = 2000


@dataclass
class LogFigures:
    """Of the whole file."""

    size: int = 0
    """Bytes."""
    lines: int = 0
    requests: int = 0
    """Lines that tell of a request each."""
    errors: Counter[str] = field(default_factory=Counter)
    """Lines of level `error` and above, by their event."""
    busiest: int = 0
    """Most lines of one second that are not of requests."""
    tracebacks: list[str] = field(default_factory=list)
    """The first few."""
    traceback_count: int = 0


def read_log(path: Path) -> LogFigures:
    """Figures of a log of JSON lines, among which other text may stand."""
    figures, by_second = LogFigures(), Counter[str]()
    traceback = False
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            figures.size += len(line.encode())
            figures.lines += 1
            record = _record(line)
            if record is None:
                traceback = _take_text(figures, line, within=traceback)
                continue
            traceback = False
            if record.get("event") == "request":
                figures.requests += 1
                continue
            by_second[str(record.get("timestamp"))[:19]] += 1
            if record.get("level") in ("error", "critical"):
                figures.errors[str(record.get("event"))] += 1
            if "exception" in record:
                figures.traceback_count += 1
                _keep(figures, line)
    figures.busiest = max(by_second.values(), default=0)
    return figures


def _take_text(figures: LogFigures, line: str, *, within: bool) -> bool:
    """A line that is no JSON. `within`: whether the one before is of a traceback. Returns whether this one is."""
    if "Traceback (most recent call last)" in line:
        figures.traceback_count += 1
        _keep(figures, line)
        return True
    if within and figures.traceback_count <= _SHOWN:
        figures.tracebacks[-1] = (figures.tracebacks[-1] + line)[:_LONGEST]
    return within


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _keep(figures: LogFigures, text: str) -> None:
    if len(figures.tracebacks) < _SHOWN:
        figures.tracebacks.append(text[:_LONGEST])
