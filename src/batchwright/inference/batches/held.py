"""Lines that wait for a provider's batches, and the batches that contain them."""

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
"""The result of a line, or "live" if it has become a live request."""


def line_name(request_id: str) -> str:
    """Return the name of a call for custom ids: at most 48 letters, digits, `_` and `-`, the same in each run."""
    if _NAME.fullmatch(request_id):
        return request_id
    return "h_" + hashlib.sha256(request_id.encode()).hexdigest()[:40]


@dataclass(slots=True, eq=False)
class HeldLine:
    """A line whose caller is waiting."""

    call: Call
    name: str
    body: Mapping[str, Any]
    """Body as it is sent."""
    size: int
    """Bytes of its line in an input file."""
    future: asyncio.Future[Outcome]
    reservation: Reservation
    tries: int = 0
    """Number of batches of this process that it was in."""
    is_noted: bool = False
    """Whether it is in a batch of the journal, which this run or a later one submits if it is not submitted yet."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch that was sealed but has not been collected."""

    entry: BatchEntry
    held: dict[str, HeldLine] = field(default_factory=dict)
    """Lines whose callers are waiting, by name."""
    left: dict[str, HeldLine] = field(default_factory=dict)
    """Lines that their callers gave up in this run, and for which money is still reserved."""
    remote: RemoteBatch | None = None
    failures: int = 0
    """Number of consecutive failed requests about it."""
    failing_since: float = 0.0
    """When the first of them failed; one that was refused for a rate limit counts as the first."""
    not_before: float = 0.0
    """Time before which nothing is done with it."""
    progressed_at: float = 0.0
    is_cancelled: bool = False
    """Whether this process has cancelled it."""

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
        """Whether the provider has checked its input, and is computing it."""
        return self.remote is not None and self.remote.accepted and self.remote.ending is None

    @property
    def is_computed(self) -> bool:
        """Whether the provider says that all its lines are done, though it may not have ended yet."""
        return self.remote is not None and 0 < self.remote.total <= self.remote.done

    @property
    def counts(self) -> tuple[int, int]:
        """Lines done, and total lines."""
        if self.remote is None or not self.remote.total:
            return 0, self.entry.lines
        return self.remote.done, self.remote.total
