"""Whether and when a failed call to a remote endpoint is retried. Pure: randomness is an argument."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchwright.backoff import Backoff
from batchwright.errors import AnswerBroken, EndpointError, EndpointUnreachable
from batchwright.request import Traffic

REFUSED = 429
"""Status of a refusal for a rate limit, which the gate waits for, without a pause here."""
_GATEWAY_STATUSES = frozenset({502, 503, 504})
"""Statuses with which a proxy answers for an endpoint that it cannot reach."""
_LONGEST_PAUSE = 600.0
_WELL = 0.5
"""Share of failing calls below which a failure says nothing about the next try."""
_TRIES_OF_500 = 5
"""Tries of a call that is answered with 500 each time: that is more often caused by the call than transient."""
_TRIES_OF_BROKEN = 5
"""Tries of a call whose answer is invalid each time: each may be charged, but a line without an answer is lost."""
_MOST_TRIES_BY_CHANCE = 10
"""Tries, instead of either number, of a call that may fail by chance as others do."""
_CHANCE = 1e-5
"""Share of calls that may fail permanently by chance alone."""


@dataclass(frozen=True, slots=True)
class EndpointRetries:
    """Number of tries of a call, and limits of the pause before the next try, in seconds."""

    attempts: int
    wait_initial: float
    wait_max: float


RETRIES: Mapping[Traffic, EndpointRetries] = {
    "online": EndpointRetries(3, 0.25, 2.0),
    "batch": EndpointRetries(30, 1.0, 60.0),
}
"""For online calls a client is waiting, so there are few tries; a line of a batch survives half an hour of refusals.
While the endpoint does not answer at all, the line goes back to its owner."""


def pause_before_retry(
    error: Exception,
    traffic: Traffic,
    retries: EndpointRetries,
    failures: Sequence[Exception],
    draw: random.Random,
    *,
    failing: float = 1.0,
) -> float | None:
    """Return the seconds before the next try, with full jitter, or None if there is none.

    Pauses grow with the number of earlier `failures`, even if the endpoint keeps naming short ones, since all tries
    would soon be used up otherwise; but not while the endpoint answers most calls: `failing` is the share of recent
    calls that it did not answer. Then a call is also not blamed for as many failures as chance gives one call in
    100,000. For online calls, a pause longer than `retries.wait_max` is left to the caller. Refusals for a rate limit
    have been retried already, as the pacer allowed.
    """
    if not isinstance(error, EndpointError) or error.status == REFUSED:
        return None
    if not (error.may_pass or isinstance(error, AnswerBroken)):
        return None
    tries = (*failures, error)
    is_well = failing < _WELL
    by_chance = _tries_by_chance(failing) if is_well else 0
    if sum(getattr(each, "status", None) == 500 for each in tries) >= max(_TRIES_OF_500, by_chance):
        return None
    if sum(isinstance(each, AnswerBroken) for each in tries) >= max(_TRIES_OF_BROKEN, by_chance):
        return None
    named = error.retry_after
    if traffic == "online" and named is not None and named > retries.wait_max:
        return None
    longest = Backoff(retries.wait_initial, retries.wait_max, jitter=(0.0, 1.0))
    return max(longest.pause(1 if is_well else len(tries), draw.random()), min(named or 0.0, _LONGEST_PAUSE))


def _tries_by_chance(failing: float) -> int:
    """Return the number of tries that all fail by chance for less than `_CHANCE` of calls, but not more than a few."""
    return min(_MOST_TRIES_BY_CHANCE, math.ceil(math.log(_CHANCE) / math.log(max(failing, _CHANCE))))


def is_outage(error: EndpointError) -> bool:
    """Return whether the endpoint may be down."""
    return isinstance(error, EndpointUnreachable) or error.status in _GATEWAY_STATUSES
