"""`FoundWindow`: an unstated limit on requests in fixed windows of one or ten seconds.

Some providers enforce a limit per minute in shorter windows: 600 a minute as 10 in each second. What is not used by the
end of a window is lost, so requests that are spread evenly, without regard to where windows begin, are refused now and
then, and lose part of each window in which they come late. A refusal that names a pause shows when the window ends; if
several show the same beginning, and the same number of requests was accepted in each of their windows, requests are
sent in step with the windows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

_LENGTHS = (10.0, 1.0)
"""Seconds of the windows that are looked for, longest first."""
_EVIDENCE = ((2, 0.03), (3, 0.1), (6, 0.1))
"""Refusals in a row that must show the same beginning, and the share of the window by which it may differ."""
_SUFFICIENT = 6
"""Refusals in a row that are evidence even if their pauses are short: those of a limit that is refilled continuously
show any beginning."""
_SPREAD = 0.1
"""Share of the window by which the beginning may differ once it is known."""
_LONG_PAUSE = 1.25
"""Average length of the pauses, in mean times between two requests at the rate of the window, that is evidence: those
of a limit that is refilled continuously last for less than one."""
_COUNT_SPREAD = 0.03
"""Share by which the numbers of accepted requests may differ, or one request if that is more."""
_BEGIN, _END = 0.04, 0.1
"""Shares of the window at its beginning and end in which no request is sent, since the time to arrive varies."""
_CORRECTED = 0.25
"""Share of a difference in the beginning that is corrected at each refusal."""
_FIRST_ROUNDS, _MOST_ROUNDS = 8, 64
"""Windows without a refusal after which one more request is tried."""
_LOST = 3
"""Unpredicted refusals, in nearly every window, after which no window counts as known."""
_EARLY_FADES = 0.8
"""Share of such refusals that still counts after each window that was used up."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """What one refusal shows."""

    ends: float
    """When the window ends, on the clock of requests that are sent."""
    pause: float
    counts: tuple[int, ...]
    """Requests accepted before it in its window, for each of the lengths that are looked for."""


class FoundWindow:
    """Windows of a limit on requests, found from refusals that say when to ask again."""

    def __init__(self) -> None:
        self.length: float | None = None
        """Seconds of a window; None: none is known."""
        self.limit = 0
        """Requests that each admits."""
        self._sent: deque[float] = deque()
        """When the requests that were not refused were sent, kept as long as a window may count them."""
        self._refusals: deque[_Refused] = deque(maxlen=_EVIDENCE[-1][0])
        self._start = 0.0
        """When some window began."""
        self._window = 0
        """Number of the present window since then."""
        self._used = 0
        """Requests sent in the present window."""
        self._step = 0
        """Requests beyond the limit that are tried in the present window."""
        self._next_step = 1
        self._rounds = _FIRST_ROUNDS
        self._quiet = 0
        """Windows in a row that were used up without a refusal."""
        self._proven = 0
        """Requests that each window admitted before more were tried."""
        self._patience = _FIRST_ROUNDS
        """Windows without a refusal after which more were tried."""
        self._early = 0.0
        """Recent refusals that were not predicted; earlier ones count less."""

    @property
    def rate(self) -> float:
        """Requests per second that the windows admit; only while they are known."""
        return self.limit / self.length if self.length else 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next request may go; 0 while no window is known."""
        if self.length is None:
            return 0.0
        self._advance(now)
        allowed = self.limit + self._step
        if self._used >= allowed:
            return self._begins(self._window + 1) - now
        # The n-th request has the n-th part of the window, counted without its margins.
        share = _BEGIN + (1.0 - _BEGIN - _END) * self._used / allowed
        return max(0.0, self._start + (self._window + share) * self.length - now)

    def begin(self, now: float) -> None:
        """Count a request that is sent."""
        self._sent.append(now)
        while self._sent[0] < now - 2.0 * _LENGTHS[0]:
            self._sent.popleft()
        if self.length is not None:
            self._advance(now)
            self._used += 1

    def withdrawn(self, sent_at: float) -> None:
        """Note that a request was refused, or was not sent after all."""
        if sent_at in self._sent:
            self._sent.remove(sent_at)

    def refused(self, sent_at: float, retry_after: float | None) -> None:
        """Learn from a refusal, and from the seconds that it names, during which nothing is admitted."""
        if retry_after is None or not 0.0 < retry_after <= (self.length or _LENGTHS[0]):
            self._refusals.clear()
            self._mistrust()
            return
        ends = sent_at + retry_after
        counts = tuple(sum(ends - length <= each < sent_at for each in self._sent) for length in _LENGTHS)
        self._refusals.append(_Refused(ends, retry_after, counts))
        if self.length is None:
            self._find()
        else:
            self._follow(self._refusals[-1])

    def forget(self) -> None:
        """Forget the windows."""
        self.length = None
        self._refusals.clear()

    def _find(self) -> None:
        for fewest, spread in _EVIDENCE:
            latest = list(self._refusals)[-fewest:]
            if len(latest) < fewest:
                return
            for number, length in enumerate(_LENGTHS):
                if length < _LENGTHS[0] and all(each.pause.is_integer() for each in latest):
                    continue  # rounded up
                counts = sorted(each.counts[number] for each in latest)
                if counts[0] < 2 or counts[-1] - counts[0] > max(1.0, _COUNT_SPREAD * counts[-1]):
                    continue
                if any(later.ends - earlier.ends <= 0.5 * length for earlier, later in pairwise(latest)):
                    continue
                offsets = [_offset(each.ends, latest[-1].ends, length) for each in latest]
                pause = sum(each.pause for each in latest) / fewest
                is_evidence = fewest >= _SUFFICIENT or pause >= _LONG_PAUSE * length / counts[-1]
                if is_evidence and max(offsets) - min(offsets) <= spread * length:
                    self._know(length, counts[fewest // 2], latest[-1].ends + sum(offsets) / fewest)
                    return

    def _know(self, length: float, limit: int, start: float) -> None:
        self.length, self.limit, self._start = length, limit, start
        self._window, self._used, self._step = -1, limit, 0
        self._proven, self._patience = limit, _FIRST_ROUNDS
        self._next_step, self._rounds, self._quiet, self._early = 1, _FIRST_ROUNDS, 0, 0.0

    def _follow(self, refusal: _Refused) -> None:
        """Learn from a refusal while the windows are known."""
        assert self.length is not None
        offset = _offset(refusal.ends, self._start, self.length)
        if abs(offset) > _SPREAD * self.length:
            self._mistrust()
            return
        self._start += _CORRECTED * offset
        accepted = refusal.counts[_LENGTHS.index(self.length)]
        if accepted >= self.limit:
            self._proven = self.limit
            if self._step and self._next_step == 1:
                self._rounds = min(_MOST_ROUNDS, 2 * self._rounds)
        elif self._proven < self.limit:
            # More fitted once: some came so late that the next window had them.
            self.limit = max(1, self._proven)
            self._rounds = self._patience = min(_MOST_ROUNDS, 2 * self._patience)
        else:
            if self._early >= _EARLY_FADES:
                self.limit = max(1, accepted)
            self._mistrust()
        self._step, self._next_step, self._quiet = 0, 1, 0
        self._used = max(self._used, self.limit)

    def _mistrust(self) -> None:
        """Note that the windows did not predict a refusal; after several of those, forget the windows."""
        self._early += 1.0
        if self._early >= _LOST:
            self.forget()

    def _begins(self, window: int) -> float:
        assert self.length is not None
        return self._start + (window + _BEGIN) * self.length

    def _advance(self, now: float) -> None:
        assert self.length is not None
        window = int((now - self._start) // self.length)
        if window <= self._window:
            return
        was_used = self._used >= self.limit + self._step
        self._window, self._used = window, 0
        if not was_used:
            self._step = 0
            return
        self._early *= _EARLY_FADES
        self._quiet += 1
        if self._quiet >= _FIRST_ROUNDS:
            self._proven = max(self._proven, self.limit)
        if self._step:
            # More were accepted: the next step is larger.
            self.limit += self._step
            self._next_step, self._rounds, self._quiet = 2 * self._step, 1, 0
        self._step = self._next_step if self._quiet >= self._rounds else 0


def _offset(time: float, start: float, length: float) -> float:
    """Return by how much a time is later than the nearest beginning of a window; negative if it is earlier."""
    return (time - start + 0.5 * length) % length - 0.5 * length
