"""What a run shows about the limits of an endpoint elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from batchwright.pacing.long_waits import limit_text, span

if TYPE_CHECKING:
    from batchwright.pacing.figures import LimitFigures, PacerFigures

_WORTH_SAYING = 2.0
"""Seconds for which an endpoint must refuse requests for that to be shown."""
_LONG_WAIT = 30.0
"""Seconds for which a request must wait for a limit for that to be shown."""


def pacing_line(pacing: Mapping[str, PacerFigures]) -> str | None:
    """Return what bounds a run now, in a few words; None where nothing is known."""
    if not pacing:
        return None
    parts = []
    for name, figures in pacing.items():
        named = f"{_without_address(name)}: " if len(pacing) > 1 and name else ""
        refused = [f"{figures.refused:,} refused"] if figures.refused else []
        parts.append(named + ", ".join([*_bounds(figures), *refused]))
    return "; ".join(parts)


def pacing_rows(pacing: Mapping[str, PacerFigures]) -> list[tuple[str, str]]:
    """Return the rows of a report's table about an endpoint."""
    rows = []
    for position, (name, figures) in enumerate(pacing.items(), 1):
        # Names are long, and are shown where there is room. Those of several endpoints begin with a number.
        number, _, rest = name.partition(" ")
        number, rest = (number, rest) if number.isdigit() and rest else (str(position), name)
        label, named = (f" {number}", f"{rest}: " if rest else "") if len(pacing) > 1 else ("", "")
        share = 1000.0 * figures.refused / figures.sent if figures.sent else 0.0
        refused = f", {figures.refused:,} refused for a limit ({share:.1f} in 1,000)" if figures.refused else ""
        sent = f"{figures.sent:,} request{'' if figures.sent == 1 else 's'} sent{refused}"
        rows.append((f"endpoint{label}", f"{named}{sent}"))
        found = _bounds(figures, at_the_end=True)
        if found:
            rows.append((f"limits{label}", ", ".join(found)))
    return rows


def _without_address(name: str) -> str:
    """Return the name of an endpoint and model, which may begin with a number, without its address."""
    return " ".join(word for word in name.split(" ") if "://" not in word)


def _bounds(figures: PacerFigures, *, at_the_end: bool = False) -> list[str]:
    found = [_limit(each) for each in figures.limits]
    if figures.found_per_minute is not None:
        found.append(f"found {figures.found_per_minute:,.0f} requests/min")
    if at_the_end:
        found.append(f"{'found' if figures.found_concurrency else 'up to'} {figures.concurrency:,} at once")
        return found
    # Fewer may have proved better lately; those already under way end by themselves.
    falls = figures.under_way > figures.concurrency
    found.append(
        f"{figures.under_way:,} {'at once, falling to' if falls else 'of'} {figures.concurrency:,}"
        f"{'' if falls else ' at once'}{' (found)' * figures.found_concurrency}"
    )
    if figures.waits_for is not None and figures.next_in > _LONG_WAIT:
        found.append(f"{limit_text(figures.waits_for)} used up for {span(figures.next_in)} more")
    elif figures.blocked_seconds > _WORTH_SAYING:
        found.append(f"refused for {span(figures.blocked_seconds)} more")
    return found


def _limit(limit: LimitFigures) -> str:
    return f"{'stated' if limit.is_stated else 'configured'} {limit_text(limit)}"
