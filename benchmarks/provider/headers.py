"""What a response's headers state about the limits, in OpenAI's and in Anthropic's form."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from benchmarks.provider.amounts import Quantity, duration
from benchmarks.provider.limits import Limit, Limits

_SLACK = 1e-9


def openai_headers(limits: Limits, now: float) -> dict[str, str]:
    """What the stated limits say in OpenAI's form, which Groq, Azure and others have too."""
    headers: dict[str, str] = {}
    for quantity in (Quantity.REQUESTS, Quantity.TOKENS):
        if (limit := _stated(limits, now, quantity)) is not None:
            headers |= {
                f"x-ratelimit-limit-{quantity}": f"{limit.limit(now):.0f}",
                f"x-ratelimit-remaining-{quantity}": f"{math.floor(limit.remaining(now) + _SLACK)}",
                f"x-ratelimit-reset-{quantity}": duration(limit.reset(now)),
            }
    return headers


def anthropic_headers(limits: Limits, now: float, unix_time: float) -> dict[str, str]:
    """What the stated limits say in Anthropic's form: tokens to the nearest thousand, resets as dates.

    `unix_time` is the date of `now`. `tokens` states the token limit with the least left.
    """
    headers: dict[str, str] = {}
    stated = {quantity: _stated(limits, now, quantity) for quantity in Quantity}
    known = [limit for quantity, limit in stated.items() if quantity is not Quantity.REQUESTS and limit is not None]
    tightest = min(known, key=lambda limit: limit.remaining(now) / limit.limit(now), default=None)
    for quantity, limit in stated.items():
        shown = tightest if quantity is Quantity.TOKENS else limit
        if shown is not None:
            left = shown.remaining(now)
            left = math.floor(left + _SLACK) if quantity is Quantity.REQUESTS else round(left, -3)
            reset = datetime.fromtimestamp(math.ceil(unix_time + shown.reset(now)), UTC)
            name = f"anthropic-ratelimit-{quantity.replace('_', '-')}"
            headers |= {
                f"{name}-limit": f"{shown.limit(now):.0f}",
                f"{name}-remaining": f"{left:.0f}",
                f"{name}-reset": f"{reset:%Y-%m-%dT%H:%M:%SZ}",
            }
    return headers


def _stated(limits: Limits, now: float, quantity: Quantity) -> Limit | None:
    """The stated limit of a quantity that has the smallest share left."""
    stated = [limit for limit in limits.limits if limit.stated and limit.quantity is quantity]
    return min(stated, key=lambda limit: limit.remaining(now) / limit.limit(now), default=None)
