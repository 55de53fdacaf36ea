"""Time limits of connections."""

from __future__ import annotations

import pytest

from batchwright.server.connections.patience import ConnectionTimeouts, Overdue, Patience, Phase

_TIMEOUTS = ConnectionTimeouts(header=15.0, write=60.0)


def _looked(patience: Patience, now: float, *, unsent: int = 0, more_comes: bool = False) -> Overdue | None:
    return patience.overdue(now, unsent=unsent, more_comes=more_comes)


@pytest.mark.parametrize(
    ("phase", "overdue"),
    [(Phase.HEAD, Overdue.HEAD), (Phase.REST, Overdue.REST), (Phase.REQUEST, None), (Phase.IDLE, None)],
)
def test_each_phase_has_its_time_from_its_beginning(phase: Phase, overdue: Overdue | None) -> None:
    patience = Patience(_TIMEOUTS, 0.0)
    patience.enter(Phase.REQUEST, 50.0)
    patience.enter(phase, 100.0)
    assert _looked(patience, 114.9) is None
    assert _looked(patience, 115.0) is overdue


def test_a_phase_that_is_entered_again_goes_on() -> None:
    patience = Patience(_TIMEOUTS, 0.0)
    assert not patience.enter(Phase.HEAD, 10.0)
    assert _looked(patience, 15.0) is Overdue.HEAD


def test_what_is_unread_has_time_from_the_last_progress() -> None:
    patience = Patience(_TIMEOUTS, 0.0)
    patience.enter(Phase.REQUEST, 0.0)
    assert _looked(patience, 0.0, unsent=100_000) is None
    assert _looked(patience, 59.0, unsent=99_000) is None
    assert _looked(patience, 118.9, unsent=99_000) is None
    assert _looked(patience, 119.0, unsent=99_000) is Overdue.WRITE


def test_an_answer_that_still_grows_says_nothing_about_its_client() -> None:
    patience = Patience(_TIMEOUTS, 0.0)
    patience.enter(Phase.REQUEST, 0.0)
    assert _looked(patience, 0.0, unsent=1000, more_comes=True) is None
    assert _looked(patience, 100.0, unsent=2000, more_comes=True) is None
    assert _looked(patience, 101.0, unsent=2000) is None
    assert _looked(patience, 161.0, unsent=2000) is Overdue.WRITE


def test_what_was_read_to_its_end_is_forgotten() -> None:
    patience = Patience(_TIMEOUTS, 0.0)
    patience.enter(Phase.REQUEST, 0.0)
    for now, unsent in ((0.0, 1000), (50.0, 0), (100.0, 1000), (159.9, 1000)):
        assert _looked(patience, now, unsent=unsent) is None


def test_what_was_read_and_filled_again_is_progress() -> None:
    patience = Patience(_TIMEOUTS, 0.0)
    patience.enter(Phase.REQUEST, 0.0)
    for now in (0.0, 50.0, 100.0, 150.0):
        assert _looked(patience, now, unsent=1000) is None
        patience.progressed()
