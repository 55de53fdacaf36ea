"""How long a connection may take: when its time is over is decided here, from the time and what is seen of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "idle"
    """A next request, of which nothing has come. Ended by the server's own timer."""
    HEAD = "head"
    """The rest of a request's head, or the first byte on a new connection."""
    REQUEST = "request"
    """The service: a request is under way. Its body has limits of its own."""
    REST = "rest"
    """The rest of a body that nobody reads, since its request was answered."""


class Overdue(Enum):
    """What took too long."""

    HEAD = "header_timeout"
    REST = "body_timeout"
    WRITE = "write_timeout"


@dataclass(frozen=True, slots=True)
class ConnectionTimeouts:
    """Seconds."""

    header: float
    """For the whole head of a request, however its bytes come."""
    write: float
    """Without progress in what a client has to read."""


class Patience:
    """The times of one connection."""

    def __init__(self, timeouts: ConnectionTimeouts, now: float) -> None:
        self._timeouts = timeouts
        self.phase = Phase.HEAD
        self._since = now
        self._unsent = 0
        self._stalled_since: float | None = None

    def enter(self, phase: Phase, now: float) -> bool:
        """Note what the connection waits for. Its time restarts when that is something else than before: then True."""
        if phase is self.phase:
            return False
        self.phase, self._since = phase, now
        return True

    def progressed(self) -> None:
        """The client has read so much that more can be written."""
        self._stalled_since = None

    def overdue(self, now: float, *, unsent: int, more_comes: bool) -> Overdue | None:
        """What has taken too long; None while nothing has.

        `unsent`: bytes that wait for the client to read. `more_comes`: whether the service may add to them, in which
        case their number says nothing about the client.
        """
        if self._stalled(now, unsent, more_comes):
            return Overdue.WRITE
        if now - self._since < self._timeouts.header:
            return None
        return {Phase.HEAD: Overdue.HEAD, Phase.REST: Overdue.REST}.get(self.phase)

    def _stalled(self, now: float, unsent: int, more_comes: bool) -> bool:
        progress = unsent < self._unsent
        self._unsent = unsent
        if more_comes or unsent == 0:
            self._stalled_since = None
        elif self._stalled_since is None or progress:
            self._stalled_since = now
        return self._stalled_since is not None and now - self._stalled_since >= self._timeouts.write
