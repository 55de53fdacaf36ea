"""Classes of online requests with service level objectives: which class a request belongs to, and whether it was met.

A class only says how its requests are judged. When they are computed is decided by their priority, and the engine's
`ttft_ms` and `tpot_ms` bound its steps for all online requests.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from batchwright.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServiceStopping,
    shown,
)
from batchwright.histograms import Histogram
from batchwright.store.records import ApiKey
from batchwright.wire.fields import priority_or_default

SLO_HEADER = "x-slo-class"
TARGETS = ("ttft_ms", "tpot_ms", "latency_ms")
MOST_CLASSES = 20
"""Most classes. Each is a label of metrics."""
Verdict: TypeAlias = Literal["met", "missed", "failed", "refused"]
VERDICTS: tuple[Verdict, ...] = ("met", "missed", "failed", "refused")
_RECENT = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Objective of a class of online requests. Times in milliseconds; None: no target."""

    ttft_ms: float | None = None
    """Most time from a request to its first token. Judged, as `tpot_ms` is, for streams only."""
    tpot_ms: float | None = None
    """Most mean time between two tokens of a request."""
    latency_ms: float | None = None
    """Most time from a request to the end of its answer."""
    goal: float = 0.99
    """Share of the requests that are to meet all targets."""
    max_priority: int | None = None
    """Largest priority number of the requests that are in this class without naming it; None: priorities do not count.

    If several classes match, the one with the smallest number is chosen."""
    keys: tuple[str, ...] = ()
    """Names and ids of API keys whose requests are in this class without naming it."""


_FIELDS = tuple(each.name for each in fields(SloClass))


def read_slo_classes(value: object) -> Mapping[str, SloClass]:
    """Return classes by name from tables, or from text: `interactive: ttft_ms=500 keys=app,web; bulk: latency_ms=6e4`.

    Raises ValueError that names the class, the key and its value.
    """
    tables = _tables_of(value) if isinstance(value, str) else value
    if not isinstance(tables, Mapping):
        raise ValueError("must be tables such as [slo.interactive] ttft_ms = 500")
    if len(tables) > MOST_CLASSES:
        raise ValueError(f"has {len(tables)} classes: at most {MOST_CLASSES}")
    classes = {str(name): _class_of(str(name), table) for name, table in tables.items()}
    chosen = Counter(key for each in classes.values() for key in set(each.keys))
    if twice := [key for key, number in chosen.items() if number > 1]:
        raise ValueError(f"the key {shown(twice[0])} is in several classes")
    chosen_priorities = Counter(each.max_priority for each in classes.values() if each.max_priority is not None)
    if again := [priority for priority, number in chosen_priorities.items() if number > 1]:
        raise ValueError(f"max_priority={again[0]} is in several classes")
    return classes


def _tables_of(text: str) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, colon, rest = part.partition(":")
        if not colon or name.strip() in tables:
            raise ValueError(f"{part!r}: write each class once, as NAME: KEY=VALUE KEY=VALUE; NAME: ...")
        pairs = [pair.partition("=") for pair in rest.split()]
        if twice := [key for key, number in Counter(key for key, _, _ in pairs).items() if number > 1]:
            raise ValueError(f"{name.strip()}: {twice[0]} is given twice")
        tables[name.strip()] = {key: _value_of(key, value) for key, _, value in pairs}
    return tables


def _value_of(key: str, text: str) -> object:
    if key == "keys":
        return [each for each in text.split(",") if each]
    try:
        return int(text) if key == "max_priority" else float(text)
    except ValueError:
        return text


def _class_of(name: str, table: object) -> SloClass:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{shown(name)} cannot be the name of a class; use letters, digits and . _ -, up to 64")
    if isinstance(table, SloClass):
        return table
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}: must be a table such as [slo.{name}] ttft_ms = 500")
    if unknown := [key for key in table if key not in _FIELDS]:
        raise ValueError(f"{name}: there is no {unknown[0]!r}; the keys are: {', '.join(_FIELDS)}")
    if not any(key in table for key in TARGETS):
        raise ValueError(f"{name}: has no target; give one or more of {', '.join(TARGETS)}")
    for key, value in table.items():
        _check(name, str(key), value)
    return SloClass(**{**table, "keys": tuple(table.get("keys", ()))})


def _check(name: str, key: str, value: object) -> None:
    if key == "keys":
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) and each for each in value):
            raise ValueError(f"{name}.keys={shown(value)}: must be a list of names or ids of API keys")
    elif key == "max_priority":
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name}.max_priority={shown(value)}: must be a whole number")
    else:
        most = 1.0 if key == "goal" else math.inf
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most or value == math.inf:
            bounds = "a number above 0 and at most 1" if key == "goal" else "a number of milliseconds above 0"
            raise ValueError(f"{name}.{key}={shown(value)}: must be {bounds}")


@dataclass(slots=True)
class SloFigures:
    """How the requests of one class fared. Not counted: those that clients cancelled, or no model could serve."""

    objective: SloClass
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    """Answered requests that missed a target, by target."""
    times: Mapping[str, Histogram] = field(default_factory=lambda: {target: Histogram() for target in TARGETS})
    """Times of answered requests in milliseconds, by target."""
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def attained(self) -> float | None:
        """Share of the last requests, a thousand at most, that met all targets; None: there were none."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def answered(self, times: Mapping[str, float]) -> None:
        """Count an answered request with those of its times that are known, by target."""
        missed = []
        judged = False
        for target, value in times.items():
            self.times[target].add(value)
            limit = getattr(self.objective, target)
            if limit is not None:
                judged = True
                if value > limit:
                    missed.append(target)
        if judged:
            self.misses.update(missed)
            self._count("missed" if missed else "met")

    def failed(self, error: Exception) -> None:
        """Count a request that ended with `error`, unless the request is at fault."""
        if isinstance(error, (InvalidRequest, ModelNotFound)):
            return
        if isinstance(error, (Overloaded, ServiceStopping)):
            self._count("refused")
        else:
            self._count("missed" if isinstance(error, DeadlineExceeded) else "failed")

    def _count(self, verdict: Verdict) -> None:
        self.verdicts[verdict] += 1
        self._recent.append(verdict == "met")


def slo_class_of(
    classes: Mapping[str, SloClass], named: str | None, key: ApiKey | None, body: Mapping[str, Any]
) -> str | None:
    """Return the class of a request: the one that its header names, else that of its key, else of its priority.

    Raises `InvalidRequest` for an unknown name.
    """
    if named is not None:
        if named not in classes:
            known = ", ".join(classes) or "none on this service"
            raise InvalidRequest(f"{SLO_HEADER}={shown(named)}: the classes are: {known}", param=SLO_HEADER)
        return named
    if key is not None:
        for name, each in classes.items():
            if key.id in each.keys or key.name in each.keys:
                return name
    priority = priority_or_default(body)
    fitting = [
        (each.max_priority, name)
        for name, each in classes.items()
        if each.max_priority is not None and priority <= each.max_priority
    ]
    return min(fitting)[1] if fitting else None
