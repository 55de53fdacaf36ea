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
    before = ""
    with path.open(encoding="utf-8", errors="replace") as log:
        for line in log:
            figures.size += len(line.encode())
            figures.lines += 1
            record = _record(line)
            if record is None:
                if "Traceback (most recent call last)" in line:
                    _add_traceback(figures, before + line + "".join(_some(log)))
            elif record.get("event") == "request":
                figures.requests += 1
            else:
                by_second[str(record.get("timestamp"))[:19]] += 1
                if record.get("level") in ("error", "critical"):
                    figures.errors[str(record.get("event"))] += 1
                if "exception" in record:
                    _add_traceback(figures, line)
            before = line
    figures.busiest = max(by_second.values(), default=0)
    return figures


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _some(log: Any) -> list[str]:
    return [line for line, _ in zip(log, range(_SHOWN), strict=False)]


def _add_traceback(figures: LogFigures, text: str) -> None:
    figures.traceback_count += 1
    if len(figures.tracebacks) < _SHOWN:
        figures.tracebacks.append(text[:_LONGEST])
