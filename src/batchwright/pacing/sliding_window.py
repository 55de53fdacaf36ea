"""`SlidingWindow`: a configured limit that holds in every window and is used evenly."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from batchwright.pacing.limits import ConfiguredLimit, Use
from batchwright.pacing.pace import Pace
from batchwright.pacing.sharing import Sharing, each, margin, oldest, wanted

_ON_THE_WAY = 0.002
"""Share by which the window is assumed to be longer: requests do not arrive as evenly as they were sent."""

_LOOK_AGAIN = 1.0
"""Seconds until a limit that others have used up is checked again."""
_LATELY = 5.0


@dataclass(slots=True, eq=False)
class Counted:
    """An amount that counts against a limit since `at`."""

    at: float
    amount: float


class SlidingWindow:
    """Keeps what is sent in any window of a configured limit below that limit.

    A provider that refills a bucket, one that counts in fixed windows and one that counts in sliding ones all admit
    what satisfies this. A single request larger than the limit goes when nothing else counts: the provider decides.
    """

    def __init__(self, configured: ConfiguredLimit) -> None:
        self.configured = configured
        self._length = configured.window * (1.0 + _ON_THE_WAY)
        self._rate = configured.limit / self._length
        self._pace = Pace()
        self._entries: deque[Counted] = deque()
        self._used = 0.0
        self._others = 0.0
        """Amount that other processes have used, as last learned."""
        self._own_rate = self._rate
        """Amount per second that this process may use."""
        self._kept_free = 0.0

    def share(self, sharing: Sharing) -> None:
        """Learn how much of the limit other processes use and want."""
        self._others = sharing.used(self.configured.kind, self.configured.window)
        kept_free = 0.0 if sharing.is_alone else margin(self.configured.window)
        self._kept_free = kept_free * self.configured.limit
        self._own_rate = sharing.part(self._rate * (1.0 - kept_free), self.configured.kind)

    def note(self, now: float, sharing: Sharing) -> dict[str, float]:
        """Return what to publish about it to other processes."""
        kind, used = self.configured.kind, self.used(now)
        age = now - self._entries[0].at if self._entries else 0.0
        mean = used / max(1, len(self._entries))
        return {kind: used, oldest(kind): age, each(kind): mean, wanted(kind): sharing.wants(self._recent(now))}

    def _recent(self, now: float) -> float:
        """Return the amount per second that was used recently."""
        amount = 0.0
        for entry in reversed(self._entries):
            if entry.at <= now - _LATELY:
                break
            amount += entry.amount
        return amount / _LATELY

    def used(self, now: float) -> float:
        """Return the amount that counts at `now`."""
        while self._entries and self._entries[0].at <= now - self._length:
            self._used -= self._entries.popleft().amount
        if not self._entries:
            self._used = 0.0
        return self._used

    def wait(self, use: Use, now: float) -> float:
        """Return the seconds until `use` may go."""
        paced = self._pace.wait(self._own_rate, now)
        amount = use.of(self.configured.kind)
        # Another process may take what is left at the same moment.
        kept_free = self._kept_free + min(amount, self._kept_free)
        excess = self.used(now) + self._others + amount + kept_free - self.configured.limit
        if excess <= 1e-9 or not (self._entries or self._others):
            return paced
        if not self._entries:
            # The others' use is learned again every second.
            return max(paced, _LOOK_AGAIN)
        for entry in self._entries:
            excess -= entry.amount
            if excess <= 1e-9:
                break
        return max(paced, entry.at + self._length - now)

    def begin(self, use: Use, now: float) -> Counted:
        """Count a request that is sent."""
        entry = Counted(now, use.of(self.configured.kind))
        self._entries.append(entry)
        self._used += entry.amount
        self._pace.take(entry.amount, self._own_rate, now)
        return entry

    def settle(self, entry: Counted, amount: float, now: float) -> None:
        """Count `amount` for the request of `entry` instead: what it used, or 0 if it was refused."""
        self.used(now)
        if entry.at > now - self._length:
            self._used += amount - entry.amount
            self._pace.give_back(entry.amount - amount)
            entry.amount = amount
