"""What becomes of the lines of a batch that has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Ending: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]
"""How a batch ended. Failed: it was refused as a whole, and nothing of it was computed."""

MOST_TRIES = 3
"""Batches that a line goes into before it counts as never computed."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a provider refused a batch."""

    code: str | None
    message: str
    line: int | None = None
    """Number of the line in the input file, from 1; None if it is not about a line."""


Fate: TypeAlias = Literal["again", "fail"]


def fate_without_result(ending: Ending, tries: int, problem: Problem | None, *, others_blamed: bool) -> Fate:
    """Return what becomes of a line that has no result in a batch that ended.

    `tries`: batches that it was in, this one included; `problem`: of this line, or of the batch if no line is blamed;
    `others_blamed`: whether the provider refused the batch because of other lines.

    A line that expired, was cancelled, or was refused because of others goes into another batch. One that was blamed
    fails.
    """
    if ending == "failed" and problem is not None and not others_blamed:
        return "fail"
    return "again" if tries < MOST_TRIES else "fail"


def reason_without_result(ending: Ending, tries: int) -> str:
    """Return the message of a line that has no result after its last try."""
    what = {
        "completed": "ended without a result for it",
        "failed": "was refused",
        "expired": "expired before it was computed",
        "cancelled": "was cancelled before it was computed",
    }[ending]
    return f"the line was in {tries} batches, the last of which {what}"
