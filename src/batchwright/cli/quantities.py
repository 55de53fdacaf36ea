"""Counts and durations, as commands print them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as `1 line` and `1,200 lines`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Return a time as `1:02:03` or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
