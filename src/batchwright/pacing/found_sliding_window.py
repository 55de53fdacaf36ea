"""`FoundSlidingWindow`: an unstated limit on the requests of the last minute.

If a limit per minute slides, a request is admitted again when one that was sent a minute ago no longer counts. An even
pace would use as much in a minute, but later: a burst can be followed by the same burst a minute later. A refusal shows
when the oldest request will no longer count. If another refusal comes after that time, when few requests have been
accepted since and as many counted as at the first, the limit slides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

from batchwright.pacing.limits import MINUTE

_LONG_PAUSE = 10.0
"""Fewest seconds that the first refusal must name: for a limit that is refilled continuously, it names few."""
_FEW = 0.5
"""Most of the limit that may have been accepted since a window's end: with more, a new window may have begun."""
_COUNT_SPREAD = 0.03
"""Share by which the counts at the two refusals may differ, or one request if that is more."""
_LEAST_COUNT = 4
_LATE, _MOST_LATE = 0.12, 2.0
"""Extra seconds for which a request is assumed to count, at first and at most: it arrives some time after it was sent
and, if this machine or the endpoint was busy, the one that follows a minute later may be faster."""
_MORE_LATE, _LESS_LATE = 0.1, 0.8
"""Least seconds by which that grows at an unexpected refusal, and share that remains after a minute without one."""
_ON_THE_WAY = 0.02
"""Seconds by which the times that two requests take to arrive may differ."""
_STEP = 0.01
"""Step by which more is tried after a minute without a refusal: a share of the limit, but at least one request."""
_MOST_QUIET = 16
"""Most minutes without a refusal until more is tried."""
_LOST = 3
"""Times of unpredicted refusals in a minute after which the limit no longer counts as known."""
_ANSWERED_WITHIN = 5.0
"""Seconds within which nearly all refusals of a request arrive."""
_AT_ONCE = 1.0
"""Seconds within which refusals have one cause, such as a moment when this machine was busy with something else."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """What one refusal shows."""

    sent_at: float
    ends: float
    """When the oldest request no longer counts, on the clock of requests that are sent."""
    count: int
    """Requests accepted in the minute before it."""


class FoundSlidingWindow:
    """A sliding limit on requests in a minute, found from refusals that say when to ask again."""

    def __init__(self) -> None:
        self.limit = 0
        """Most requests that may count at once; 0: no limit is known."""
        self._sent = deque[float]()
        """When the requests of the last minute that were not refused were sent."""
        self._past = deque[float]()
        """When the earlier ones were sent, kept as long as they may show the limit."""
        self._first_refusal: _Refused | None = None
        self._step = 0
        self._tried_at = 0.0
        """When a request beyond the limit was last tried or refused."""
        self._quiet = 1
        """Minutes until more is tried."""
        self._early: deque[float] = deque(maxlen=_LOST)
        """Times at which refusals came that were not predicted."""
        self._late = _LATE
        """Seconds beyond a minute for which a request is assumed to count."""
        self._late_at = 0.0
        """When that was last changed."""

    @property
    def rate(self) -> float:
        """Requests per second that the limit admits; 0 while none is known."""
        return self.limit / MINUTE

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go; 0 while no limit is known."""
        if not self.limit:
            return 0.0
        if now >= self._late_at + MINUTE:
            self._late, self._late_at = max(_LATE, _LESS_LATE * self._late), now
        self._forget_before(now)
        self._try_more(now)
        excess = len(self._sent) - self.limit - self._step
        return 0.0 if excess < 0 else self._sent[excess] + MINUTE + self._late - now

    def begin(self, now: float) -> None:
        """Count a request that is sent."""
        self._sent.append(now)
        self._forget_before(now)

    def withdrawn(self, sent_at: float) -> None:
        """Note that a request was refused, or was not sent after all."""
        if sent_at in self._sent:
            self._sent.remove(sent_at)
        elif sent_at in self._past:
            self._past.remove(sent_at)

    def refused(self, sent_at: float, retry_after: float | None) -> None:
        """Learn from a refusal, and from the seconds that it names, during which nothing is admitted."""
        if retry_after is None or not 0.0 < retry_after <= MINUTE:
            if self.limit:
                self._mistrust(sent_at)
            return
        longer = self._late if self.limit else _ON_THE_WAY
        count = sum(sent_at - MINUTE - longer < each < sent_at for each in chain(self._past, self._sent))
        refusal = _Refused(sent_at, sent_at + retry_after, count)
        if self.limit:
            self._follow(refusal, sent_at)
        elif self._first_refusal is not None and self._shows_sliding(self._first_refusal, refusal, sent_at):
            self.limit, self._step, self._tried_at = self._accepted_around(self._first_refusal), 0, sent_at
            self._quiet, self._first_refusal = 1, None
            self._late, self._late_at = _LATE, sent_at
            self._early.clear()
        elif retry_after >= _LONG_PAUSE:
            self._first_refusal = refusal

    def forget(self) -> None:
        """Forget the limit."""
        self.limit, self._first_refusal = 0, None

    def _shows_sliding(self, first: _Refused, second: _Refused, sent_at: float) -> bool:
        if sent_at < first.ends or second.count < _LEAST_COUNT:
            return False
        since = sum(first.ends <= each < sent_at for each in self._sent)
        if since > _FEW * first.count:
            return False
        return abs(second.count - first.count) <= max(1.0, _COUNT_SPREAD * first.count)

    def _accepted_around(self, refusal: _Refused) -> int:
        """Return how many requests were accepted in the minute before a refusal, or under way at the same time."""
        return sum(refusal.sent_at - MINUTE < each < refusal.ends for each in chain(self._past, self._sent))

    def _follow(self, refusal: _Refused, sent_at: float) -> None:
        """Learn from a refusal while the limit is known."""
        if self._step:
            self._quiet = min(_MOST_QUIET, 2 * self._quiet)
            self._step, self._tried_at = 0, sent_at
        elif refusal.count < (1.0 - _COUNT_SPREAD) * self.limit - 1.0:
            self._mistrust(sent_at)
        elif self._late + (missing := max(_MORE_LATE, refusal.ends - sent_at)) <= _MOST_LATE:
            self._late, self._late_at = self._late + missing, sent_at
        elif self._is_mistaken(sent_at):
            self.limit, self._tried_at = max(1, self.limit - 1), sent_at
            self._early.clear()

    def _mistrust(self, sent_at: float) -> None:
        if self._is_mistaken(sent_at):
            self.forget()

    def _is_mistaken(self, sent_at: float) -> bool:
        """Return whether one more unpredicted refusal is too many: a request may have arrived slightly too early."""
        if self._early and sent_at - self._early[-1] < _AT_ONCE:
            return False
        self._early.append(sent_at)
        return len(self._early) == _LOST and sent_at - self._early[0] < MINUTE

    def _try_more(self, now: float) -> None:
        """Allow more after some minutes without a refusal; what was accepted becomes the limit."""
        if now < self._tried_at + self._quiet * MINUTE:
            return
        if self._step and len(self._sent) > self.limit:
            self.limit = len(self._sent)
            self._quiet = 1
        self._step = max(1, round(_STEP * self.limit))
        self._tried_at = now

    def _forget_before(self, now: float) -> None:
        while self._sent and self._sent[0] <= now - MINUTE - self._late:
            self._past.append(self._sent.popleft())
        if self._first_refusal is not None and now > self._first_refusal.ends + MINUTE:
            self._first_refusal = None  # earlier requests are kept only as long as they can show anything
        known_from = now - MINUTE - self._late - _ANSWERED_WITHIN
        if self._first_refusal is not None:
            known_from = min(known_from, self._first_refusal.sent_at - MINUTE)
        while self._past and self._past[0] <= known_from:
            self._past.popleft()
