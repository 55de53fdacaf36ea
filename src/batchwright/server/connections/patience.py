"""The time limits of a connection: decisions from the time and the state of the connection."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "idle"
    """The next request, of which nothing has arrived. Limited by uvicorn's own timer."""
    HEAD = "head"
    """The rest of a request's head, or the first byte on a new connection."""
    REQUEST = "request"
    """The answer to a request that is under way. The request's body has limits of its own."""
    REST = "rest"
    """The rest of a body that is not read because its request was already answered."""


class Overdue(Enum):
    """What took too long, by the name under which it is counted."""

    HEAD = "header_timeout"
    REST = "body_timeout"
    WRITE = "write_timeout"


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """Time limits in seconds."""

    header: float
    """Time for the whole head of a request, however its bytes arrive."""
    write: float
    """Time without progress in sending an answer to a client."""


class Patience:
    """How long one connection has been in its phase, and without progress in sending."""

    def __init__(self, timeouts: ConnectionTimeouts, now: float) -> None:
        self._timeouts = timeouts
        self.phase = Phase.HEAD
        self._since = now
        self._unsent = 0
        self._stalled_since: float | None = None

    def enter(self, phase: Phase, now: float) -> bool:
        """Note what the connection waits for, and return whether that changed, which restarts its time."""
        if phase is self.phase:
            return False
        self.phase, self._since = phase, now
        return True

    def progressed(self) -> None:
        """Note that the client has read enough for more to be written."""
        self._stalled_since = None

    def overdue(self, now: float, *, unsent: int, more_comes: bool) -> Overdue | None:
        """Return what has taken too long; None while nothing has.

        `unsent`: bytes that wait for the client to read. `more_comes`: whether the service may add to them, in which
        case their number says nothing about the client.
        """
        progress = unsent < self._unsent
        self._unsent = unsent
        if more_comes or unsent == 0:
            self._stalled_since = None
        elif self._stalled_since is None or progress:
            self._stalled_since = now
        if self._stalled_since is not None and now - self._stalled_since >= self._timeouts.write:
            return Overdue.WRITE
        if now - self._since < self._timeouts.header:
            return None
        return {Phase.HEAD: Overdue.HEAD, Phase.REST: Overdue.REST}.get(self.phase)
