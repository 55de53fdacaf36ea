"""Validation of numeric settings."""

from __future__ import annotations

import math
from numbers import Integral


def check_size(name: str, value: int, *, least: int = 1) -> None:
    """Raise ValueError, naming the setting, unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")


def check_time(name: str, seconds: float, *, above_zero: bool = False) -> None:
    """Raise ValueError, naming the setting, unless `seconds` is a finite number of at least (or above) 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not _is_finite(seconds):
        raise ValueError(f"{name}={seconds!r}: must be a finite number")
    if seconds < 0 or (above_zero and seconds == 0):
        raise ValueError(f"{name}={seconds!r}: must be {'above' if above_zero else 'at least'} 0")


def check_priority(name: str, priority: object) -> None:
    """Raise ValueError, naming the mapping `name`, unless its key `priority` is a whole number."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"{name}: its keys are priorities, whole numbers, and {priority!r} is none")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False
