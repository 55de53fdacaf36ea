"""`run --backend` killed at random: each line one result, and none paid twice but what was under way at a kill."""

from __future__ import annotations

from pathlib import Path

from .provider_kills import CONCURRENCY, Campaign, serving

LINES, KILLS = 300, 5


def test_killed_at_random_no_line_is_asked_again_that_is_finished(tmp_path: Path) -> None:
    with serving() as address:
        figures = Campaign(tmp_path, address, LINES, KILLS).run()
    assert (figures.lines, figures.kills) == (LINES, KILLS)
    assert figures.paid == LINES + figures.paid_again
    assert figures.paid_again <= KILLS * CONCURRENCY
    # What the campaign is about has happened: something was lost, and something was refused.
    assert figures.most_at_a_kill > 0
    assert figures.refused > 0
