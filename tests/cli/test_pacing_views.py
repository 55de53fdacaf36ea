"""What a run shows of the limits of endpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchwright.cli.pacing_views import pacing_line, pacing_rows
from batchwright.pacing.figures import LimitFigures, PacerFigures
from batchwright.pacing.limits import ConfiguredLimit, Use
from batchwright.pacing.pacer import Pacer
from batchwright.wire.rate_limits import StatedLimit

FIGURES = PacerFigures(
    sent=2000, refused=0, under_way=12, concurrency=64, found_concurrency=False, found_per_minute=None, limits=[],
    blocked_seconds=0.0,
)  # fmt: skip
INPUT_A_DAY = LimitFigures("input_tokens", 30_000.0, 86400.0, 1.0, True)
OUTPUT = LimitFigures("output_tokens", 30_000.0, 10.0, 1.0, True)
STATED = LimitFigures("tokens", 30_000.0, 60.0, 1.0, True)
TOLD = LimitFigures("requests", 500.0, 60.0, 1.0, False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "12 of 64 at once"),
        ({"found_concurrency": True, "concurrency": 16}, "12 of 16 at once (found)"),
        ({"under_way": 80}, "80 at once, falling to 64"),
        ({"found_per_minute": 1234.4}, "found 1,234 requests/min, 12 of 64 at once"),
        ({"limits": [TOLD, STATED]}, "configured 500 requests/min, stated 30,000 tokens/min, 12 of 64 at once"),
        ({"blocked_seconds": 90.2}, "12 of 64 at once, refused for 90 s more"),
        ({"blocked_seconds": 1.5}, "12 of 64 at once"),
        ({"refused": 1500}, "12 of 64 at once, 1,500 refused"),
        (
            {"limits": [INPUT_A_DAY], "next_in": 30_000.0, "waits_for": INPUT_A_DAY},
            "stated 30,000 input tokens/day, 12 of 64 at once, 30,000 input tokens/day used up for 8.3 h more",
        ),
        ({"limits": [INPUT_A_DAY]}, "stated 30,000 input tokens/day, 12 of 64 at once"),
        ({"limits": [OUTPUT]}, "stated 30,000 output tokens/10 s, 12 of 64 at once"),
    ],
)  # fmt: skip
def test_progress(changes: dict[str, object], line: str) -> None:
    assert pacing_line({"m": replace(FIGURES, **changes)}) == line  # type: ignore[arg-type]


def test_where_nothing_is_known_nothing_is_shown() -> None:
    assert pacing_line({}) is None
    assert pacing_rows({}) == []


def test_the_report_of_one_endpoint_names_no_model() -> None:
    assert pacing_rows({"m": FIGURES}) == [("endpoint", "2,000 requests sent"), ("limits", "up to 64 at once")]


def test_the_report_of_several_names_each() -> None:
    other = replace(
        FIGURES, sent=1000, refused=5, found_concurrency=True, concurrency=8, limits=[STATED], blocked_seconds=9.0
    )
    assert pacing_line({"a": FIGURES, "b": other}) == (
        "a: 12 of 64 at once; b: stated 30,000 tokens/min, 12 at once, falling to 8 (found), refused for 9 s more, "
        "5 refused"
    )
    assert pacing_rows({"a": FIGURES, "b": other}) == [
        ("endpoint 1", "a: 2,000 requests sent"),
        ("limits 1", "up to 64 at once"),
        ("endpoint 2", "b: 1,000 requests sent, 5 refused for a limit (5.0 in 1,000)"),
        ("limits 2", "stated 30,000 tokens/min, found 8 at once"),
    ]


def test_addresses_stand_where_there_is_room() -> None:
    pacing = {"1 https://host/v1 a": FIGURES, "3 https://other/v1 a": FIGURES}
    assert pacing_line(pacing) == "1 a: 12 of 64 at once; 3 a: 12 of 64 at once"
    assert pacing_rows(pacing)[2] == ("endpoint 3", "https://other/v1 a: 2,000 requests sent")


def test_what_a_real_pacer_has_found() -> None:
    pacer = Pacer(64, [ConfiguredLimit("requests", 600.0)])
    attempt = pacer.begin(Use(10.0, 20.0), 0.0)
    stated = [StatedLimit("tokens", 1000, 990, 0.6, 60.0)]
    pacer.refused(attempt, 1.0, retry_after=30.0, stated=stated)
    assert pacing_line({"": pacer.figures(1.0)}) == (
        "configured 600 requests/min, stated 1,000 tokens/min, 0 of 16 at once, refused for 30 s more, 1 refused"
    )
