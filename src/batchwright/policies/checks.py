"""Refusing settings that make no sense."""

from __future__ import annotations

import math


def check_size(name: str, value: int) -> None:
    """Raises ValueError, naming the setting, for what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")


def check_time(name: str, seconds: float, *, above_zero: bool = False) -> None:
    """Raises ValueError, naming the setting, for what is not a finite time of at least (or above) 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        raise ValueError(f"{name}={seconds!r}: must be a finite number")
    if seconds < 0 or (above_zero and seconds == 0):
        raise ValueError(f"{name}={seconds!r}: must be {'above' if above_zero else 'at least'} 0")
