"""`RandomRefusals`: the share of requests that an endpoint refuses at random, whatever the rate at which they come.

An endpoint that many clients share refuses some requests for lack of capacity, with the status of a rate limit. A limit
found from such refusals falls without end: each says that less is accepted than was thought, and going slower makes
none of them rarer. They differ from the refusals of a limit in that they continue right after a refusal, when less is
sent than the limit that it showed. Their share at such times is assumed to be their share everywhere: that many
refusals are absorbed, that is, nothing is learned from them, and only those in excess show a limit. This assumption is
tested: the limits are searched for again, and if they are found where they were, they were limits after all.
"""

from __future__ import annotations

from collections import deque

_FEWEST, _FEWEST_BESIDE = 4.0, 2.0
"""Refusals below a limit that are evidence; fewer suffice if the endpoint states limits with enough left."""
_LEAST, _MOST = 0.008, 0.5
"""Refused shares of requests below a limit that are evidence: less is chance, and more means that a limit fell."""
_VANISHED = 0.3
"""Part of the least share below which refusals no longer count as random."""
_SHARE_WEIGHT = 1.0 / 400.0
"""Weight of the latest request in that share."""
_NONE_COMES = 8.0
"""Multiple of the expected requests per refusal that pass without one before refusals no longer count as random."""
_EXCESS = 1.5
"""Factor by which more refusals are absorbed than expected."""
_CREDIT, _MOST_CREDIT = 3.0, 8.0
"""Refusals in a row that are absorbed: after one that was not, and at most."""
_ROW_PAUSE = 0.5
"""Seconds after a refusal within which a rate or a limit on concurrency makes room for the next request."""
_IN_A_ROW, _ROW_WEIGHT = 0.3, 1.0 / 50.0
"""Share of refusals that still follow another one, above which windows are to blame; weight of the latest."""
_TRIED, _GAIN = 2, 1.15
"""Limits that are found in a trial, and the factor by which the last must exceed the one from before it."""
_BELIEVED_FOR = 100.0
"""Seconds for which limits that a trial has confirmed are believed."""
_RATES = 32


class RandomRefusals:
    """Learns for each request whether it was sent below the known limits, and whether it was refused."""

    def __init__(self) -> None:
        self.share = 0.0
        """Share of requests that are refused at random; 0: none, as far as known."""
        self._sent = self._refused = 0.0
        """Requests below a limit, and those of them that were refused; earlier ones count less."""
        self._credit = 0.0
        """Refusals that are absorbed if they come now."""
        self._number = 0
        """Number of the latest request."""
        self._last_refused, self._refused_at = 0, float("-inf")
        """Number of the latest refused request, and when its refusal became known."""
        self._in_a_row = 0.0
        """Share of recent refusals that followed another one."""
        self._tried = _TRIED
        """Limits that were found in the trial."""
        self._rate_before = self._cap_before = 0.0
        """Limits that were known before it."""
        self._not_before = float("-inf")
        self._rates: deque[float] = deque(maxlen=_RATES)

    def sent(self, *, is_below: bool) -> int:
        """Count a request, and return its number; `is_below`: whether it is sent below the known limits."""
        self._number += 1
        self._credit = min(_MOST_CREDIT, self._credit + _EXCESS * self.share)
        if is_below:
            self._sent += 1.0 - _SHARE_WEIGHT * self._sent
            self._refused -= _SHARE_WEIGHT * self._refused
            if self.share and self._refused < _VANISHED * _LEAST * self._sent:
                self.share = 0.0
        if self.share and self._number - self._last_refused > _NONE_COMES / self.share:
            self._forget()
        return self._number

    def refused(self, number: int, now: float, *, is_below: bool, is_beside: bool) -> bool:
        """Learn that a request was refused; return whether this is the first sign of random refusals.

        `is_beside`: whether the endpoint states limits that have enough left.
        """
        follows = number == self._last_refused + 1 and now - self._refused_at >= _ROW_PAUSE
        self._last_refused, self._refused_at = number, now
        self._in_a_row += _ROW_WEIGHT * (follows - self._in_a_row)
        if self._in_a_row > _IN_A_ROW:
            self._forget()
        if now < self._not_before:
            self._sent = self._refused = 0.0
            return False
        if not is_below:
            return False
        self._refused += 1.0
        if self._refused < (_FEWEST_BESIDE if is_beside else _FEWEST):
            return False
        share = self._refused / max(self._sent, self._refused)
        was_known = self.share > 0.0
        if share > _MOST:
            self.share = 0.0
        elif was_known or share >= _LEAST:
            self.share = share
        return self.share > 0.0 and not was_known

    def refused_together(self, number: int, *, is_below: bool) -> None:
        """Note that a request was refused while another refused one was under way."""
        self._last_refused = max(self._last_refused, number)
        if is_below:
            self._sent = max(0.0, self._sent - 1.0)

    def absorbs(self) -> bool:
        """Return whether a refusal is absorbed, and count it if it is."""
        if self.share and self._credit >= 1.0:
            self._credit -= 1.0
            return True
        self._credit = _CREDIT
        return False

    def begin_trial(self, rate: float, cap: float) -> float:
        """Note the limits from before a search (0: none known), and return the rate at which to start it."""
        self._rate_before, self._cap_before = rate, cap
        self._tried, self._credit = 0, _CREDIT
        return max(rate, *self._rates, 0.0)

    def found(self, rate: float, cap: float, now: float) -> None:
        """Learn the rate and the concurrency limit that refusals have shown; 0: none."""
        if rate:
            self._rates.append(rate)
        if not self.share or self._tried >= _TRIED or not (rate or cap):
            return
        self._tried += 1
        if self._tried == _TRIED and rate <= _GAIN * self._rate_before and cap <= _GAIN * self._cap_before:
            self._forget()
            self._not_before = now + _BELIEVED_FOR

    def _forget(self) -> None:
        self.share = self._sent = self._refused = 0.0
