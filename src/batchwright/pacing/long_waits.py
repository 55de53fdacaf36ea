"""`LongWaits`: what to report when an endpoint accepts no requests for minutes or hours. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

from batchwright.pacing.figures import LimitFigures, PacerFigures

_LONG = 120.0
"""Shortest wait, in seconds, that is reported."""
_QUIET = 3600.0
"""Seconds for which it is then not reported again."""
_WINDOWS = {1.0: "s", 60.0: "min", 3600.0: "h", 86400.0: "day"}


class LongWaits:
    """Reports at most once an hour, for each endpoint and model, how long requests have to wait, if that is long."""

    def __init__(self) -> None:
        self._quiet_until: dict[str, float] = {}

    def news(self, pacing: Mapping[str, PacerFigures], now: float, at: datetime) -> Iterator[str]:
        """Yield what is new at `now`, which is `at` in wall-clock time."""
        for name, figures in pacing.items():
            seconds = figures.next_in
            if not figures.waiting or seconds < _LONG or now < self._quiet_until.get(name, float("-inf")):
                continue
            self._quiet_until[name] = now + max(seconds, _QUIET)
            until = at + timedelta(seconds=seconds)
            clock = f"{until:%H:%M}" if until.date() == at.date() else f"{until:%Y-%m-%d %H:%M}"
            where = "the endpoint" if len(pacing) == 1 else f"the endpoint ({name})"
            yield f"{where} takes no request before {clock}, in {span(seconds)}: {_reason(figures)}"


def limit_text(limit: LimitFigures) -> str:
    """Return a limit as `1,000 requests/min`."""
    window = _WINDOWS.get(limit.window, f"{limit.window:g} s")
    return f"{limit.limit:,.0f} {limit.kind.replace('_', ' ')}/{window}"


def span(seconds: float) -> str:
    """Return a time in the unit that fits it, such as `90 s`, `14 min` and `9.0 h`."""
    if seconds < _LONG:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"


def _reason(figures: PacerFigures) -> str:
    if figures.waits_for is None:
        return "it has refused requests until then"
    return (
        f"the {'stated' if figures.waits_for.is_stated else 'configured'} {limit_text(figures.waits_for)} are used up"
    )
