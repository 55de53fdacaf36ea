"""What is said when an endpoint takes no request for long."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from batchwright.pacing.figures import PacerFigures
from batchwright.pacing.limits import ConfiguredLimit, Use
from batchwright.pacing.long_waits import LongWaits, span
from batchwright.pacing.pacer import Pacer
from batchwright.wire.rate_limits import StatedLimit

NOON = datetime(2026, 3, 1, 12)
USE = Use(10.0, 10.0)


def figures_of(pacer: Pacer, now: float, waiting: int = 1) -> PacerFigures:
    return pacer.figures_with(waiting, USE if waiting else None, now)


def used_up(seconds: float = 86400.0) -> Pacer:
    """One whose endpoint states at 0.0 that nothing is left of ten requests in so many seconds."""
    pacer = Pacer(8)
    attempt = pacer.begin(USE, 0.0)
    stated = [StatedLimit("requests", 10, 0, seconds, seconds)]
    pacer.succeeded(attempt, 0.0, input_tokens=10, output_tokens=10, stated=stated)
    return pacer


def test_it_is_said_once_in_an_hour_and_as_long_as_it_lasts() -> None:
    pacer, waits = used_up(), LongWaits()
    said = {now: [*waits.news({"m": figures_of(pacer, now)}, now, NOON)] for now in (0.0, 1.0, 3000.0, 8000.0)}
    reason = "the stated 10 requests/day are used up"
    assert said[0.0] == [f"the endpoint takes no request before 14:24, in 2.4 h: {reason}"]
    assert said[1.0] == said[3000.0] == said[8000.0] == []
    attempt = pacer.begin(USE, 8700.0)
    pacer.succeeded(attempt, 8700.0, input_tokens=10, output_tokens=10)
    assert [*waits.news({"m": figures_of(pacer, 8700.0)}, 8700.0, NOON)] == [
        f"the endpoint takes no request before 14:23, in 2.4 h: {reason}"
    ]


def test_what_is_short_or_concerns_nobody_is_not_said() -> None:
    assert figures_of(used_up(600.0), 0.0).next_in == pytest.approx(60.0, rel=0.1)
    for pacer, waiting in ((used_up(600.0), 1), (used_up(), 0), (Pacer(8), 1)):
        assert [*LongWaits().news({"m": figures_of(pacer, 0.0, waiting)}, 0.0, NOON)] == []


def test_several_are_named_and_another_day_has_its_date() -> None:
    free, told = Pacer(8), Pacer(8, [ConfiguredLimit("requests", 1.0, 86400.0)])
    told.begin(USE, 0.0)
    found = {"a": figures_of(free, 0.0), "b": figures_of(told, 0.0)}
    (text,) = LongWaits().news(found, 0.0, NOON)
    assert text.startswith("the endpoint (b) takes no request before 2026-03-02 12:0")
    assert text.endswith("in 24.0 h: the configured 1 requests/day are used up")


def test_refusals_are_a_reason_too() -> None:
    pacer = Pacer(8)
    pacer.refused(pacer.begin(USE, 0.0), 0.0, retry_after=500.0)
    figures = figures_of(pacer, 0.0)
    assert (figures.waits_for, figures.next_in) == (None, figures.blocked_seconds)
    (text,) = LongWaits().news({"": figures}, 0.0, NOON)
    assert text == "the endpoint takes no request before 12:08, in 8 min: it has refused requests until then"
    assert [*LongWaits().news({"": replace(figures, waiting=0)}, 0.0, NOON)] == []


@pytest.mark.parametrize(("seconds", "text"), [(90.4, "90 s"), (840.0, "14 min"), (7200.0, "2.0 h"), (1e6, "277.8 h")])
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text
