"""Lines that wait for a provider's batches, and the batches that they are in."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from batchwright.inference.batches.journal import BatchEntry
from batchwright.inference.batches.provider import LineResult, RemoteBatch
from batchwright.inference.inference import Call
from batchwright.inference.metering import Reservation

_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")

Outcome: TypeAlias = LineResult | Literal["live"]
"""The result of a line; or that it has become a live request."""


def line_name(request_id: str) -> str:
    """Return the name of a call for custom ids: at most 48 letters, digits, `_` and `-`, the same at each run."""
    if _NAME.fullmatch(request_id):
        return request_id
    return "h_" + hashlib.sha256(request_id.encode()).hexdigest()[:40]


@dataclass(slots=True, eq=False)
class HeldLine:
    """A line whose caller waits."""

    call: Call
    name: str
    body: Mapping[str, Any]
    """Body as it goes out."""
    size: int
    """Bytes of its line in an input file."""
    future: asyncio.Future[Outcome]
    reservation: Reservation
    tries: int = 0
    """Batches of this process that it was in."""
    is_noted: bool = False
    """Whether it is in a batch of the journal, which this run or a later one submits if it has not been."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch that was sealed and has not been collected."""

    entry: BatchEntry
    held: dict[str, HeldLine] = field(default_factory=dict)
    """Lines whose callers wait, by name."""
    left: dict[str, HeldLine] = field(default_factory=dict)
    """Lines whose callers have given them up in this run, and for which money is still reserved."""
    remote: RemoteBatch | None = None
    failures: int = 0
    """Requests about it that failed in a row."""
    failing_since: float = 0.0
    """When the first of them failed; one that is refused for a rate counts as the first."""
    not_before: float = 0.0
    """Time before which it is left alone."""
    progressed_at: float = 0.0
    is_cancelled: bool = False
    """Whether this process has had it cancelled."""

    @property
    def may_exist(self) -> bool:
        """Whether it may be at the provider."""
        return self.entry.stage in ("creating", "created")

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.remote is not None and self.remote.ending is not None

    @property
    def is_accepted(self) -> bool:
        """Whether the provider has checked its input, and computes it."""
        return self.remote is not None and self.remote.accepted and self.remote.ending is None

    @property
    def counts(self) -> tuple[int, int]:
        """Lines done, and lines in all."""
        if self.remote is None or not self.remote.total:
            return 0, self.entry.lines
        return self.remote.done, self.remote.total
