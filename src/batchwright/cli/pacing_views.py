"""What a run shows of the limits of an endpoint elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchwright.pacing.pacer import LimitFigures, PacerFigures

_WINDOWS = {1.0: "s", 60.0: "min", 3600.0: "h", 86400.0: "day"}
_KINDS = {"requests": "requests", "tokens": "tokens", "input_tokens": "input tokens", "output_tokens": "output tokens"}
_WORTH_SAYING = 2.0
"""Seconds for which an endpoint must want no requests for that to be shown."""


def pacing_line(pacing: Mapping[str, PacerFigures]) -> str | None:
    """Return what bounds a run now, in a few words; None where nothing is known."""
    if not pacing:
        return None
    parts = [", ".join(_bounds(figures)) for figures in pacing.values()]
    refused = sum(figures.refused for figures in pacing.values())
    if refused:
        parts.append(f"{refused:,} refused")
    return "; ".join(part for part in parts if part) or None


def pacing_rows(pacing: Mapping[str, PacerFigures]) -> list[tuple[str, str]]:
    """Return the rows of a report's table about an endpoint."""
    rows = []
    for model, figures in pacing.items():
        named = f" ({model})" if len(pacing) > 1 and model else ""
        share = 1000.0 * figures.refused / figures.sent if figures.sent else 0.0
        refused = f", {figures.refused:,} refused for a limit ({share:.1f} in 1,000)" if figures.refused else ""
        rows.append((f"endpoint{named}", f"{figures.sent:,} requests sent{refused}"))
        found = _bounds(figures, at_the_end=True)
        if found:
            rows.append((f"limits{named}", ", ".join(found)))
    return rows


def _bounds(figures: PacerFigures, *, at_the_end: bool = False) -> list[str]:
    found = [_limit(each) for each in figures.limits]
    if figures.found_per_minute is not None:
        found.append(f"found {figures.found_per_minute:,.0f} requests/min")
    if figures.found_concurrency:
        found.append(f"found {figures.concurrency:,} at once")
    elif at_the_end:
        found.append(f"up to {figures.concurrency:,} at once")
    else:
        found.append(f"{figures.under_way:,} of {figures.concurrency:,} at once")
    if figures.blocked_seconds > _WORTH_SAYING and not at_the_end:
        found.append(f"refused for {figures.blocked_seconds:,.0f} s more")
    return found


def _limit(limit: LimitFigures) -> str:
    window = _WINDOWS.get(limit.window, f"{limit.window:g} s")
    return f"{'stated' if limit.is_stated else 'told'} {limit.limit:,.0f} {_KINDS[limit.kind]}/{window}"
