"""The decision what becomes of a file that no record names: pure, so whole months are tried in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from batchwright.service.files.retention import GRACE, HOUR, LONGEST_NEED, LONGEST_STEP, Sighting, Watch, judge
from batchwright.service.limits import DAY

LONGEST_LIFE = 60 * DAY
"""For which a database may need a file: 30 days until it expires, and 30 more of a batch that reads it."""


@dataclass(frozen=True)
class Stretch:
    """Sweeps that have something in common."""

    gap: float
    """Seconds from one to the next."""
    sweeps: int
    recorded: bool
    same_process: bool = True
    changed: bool = False
    """Somebody wrote to the file before the first of them."""


stretches = st.lists(
    st.builds(
        Stretch,
        gap=st.sampled_from([0.0, 1.0, 600.0, HOUR, 5 * HOUR, 40 * DAY]),
        sweeps=st.integers(1, 90),
        recorded=st.booleans(),
        same_process=st.sampled_from([True, True, True, False]),
        changed=st.sampled_from([False, False, False, True]),
    ),
    max_size=8,
)


@given(stretches, st.booleans())
def test_a_file_goes_only_after_it_was_seen_without_a_record_often_and_for_long(
    history: list[Stretch], ever_recorded: bool
) -> None:
    now, stamp, quarantined, watch = 0.0, 0, False, None
    since, sightings = 0.0, 0
    for stretch in history:
        stamp += stretch.changed
        for number in range(stretch.sweeps):
            now += stretch.gap
            elapsed = stretch.gap if stretch.same_process or number else 0.0
            seen = Sighting(str(stamp), quarantined, stretch.recorded, ever_recorded)
            verdict, watch = judge(seen, watch, elapsed)
            if stretch.recorded or (stretch.changed and number == 0):
                assert verdict == ("restore" if stretch.recorded and quarantined else "keep")
                since, sightings, quarantined = now, 0, quarantined and not stretch.recorded
                continue
            sightings += 1
            if verdict == "quarantine":
                assert not quarantined
                assert now - since >= GRACE
                assert sightings >= GRACE / LONGEST_STEP
                since, sightings, quarantined = now, 0, True
            elif verdict == "remove":
                assert quarantined
                wanted = LONGEST_NEED if ever_recorded else GRACE
                assert now - since >= wanted
                assert sightings >= wanted / LONGEST_STEP
                return
            else:
                assert verdict == "keep"


@dataclass(frozen=True)
class Reign:
    """For how long a database is in use: the right one, or an older one that does not know the file."""

    right: bool
    days: int


@given(
    st.lists(st.builds(Reign, right=st.booleans(), days=st.integers(0, 50)), max_size=6), st.floats(0.0, LONGEST_LIFE)
)
def test_what_a_database_needs_is_never_removed_whichever_was_in_use_meanwhile(
    reigns: list[Reign], needed: float
) -> None:
    now, quarantined, watch = 0.0, False, None
    for reign in reigns:
        for hour in range(24 * reign.days):
            now += HOUR
            known = reign.right and now < needed
            # The record was there when the file was uploaded.
            seen = Sighting("", quarantined, known, ever_recorded=True)
            verdict, watch = judge(seen, watch, HOUR if hour else 0.0)
            quarantined = verdict == "quarantine" or (quarantined and verdict != "restore")
            if verdict == "remove":
                assert now >= needed
                return


def test_a_left_over_of_a_crash_is_gone_after_two_days_and_any_other_file_after_two_months() -> None:
    for ever_recorded, days in ((False, 2), (True, 62)):
        watch: Watch | None = None
        quarantined, hours, verdict = False, 0, "keep"
        while verdict != "remove":
            hours += 1
            verdict, watch = judge(Sighting("", quarantined, False, ever_recorded), watch, HOUR)
            quarantined = quarantined or verdict == "quarantine"
        assert days * 24 <= hours <= days * 24 + 3


def test_time_that_was_not_measured_does_not_count() -> None:
    watch = Watch("", quarantined=False, seconds=GRACE - 1.0)
    for elapsed in (0.0, -1e9):
        assert judge(Sighting(""), watch, elapsed) == ("keep", watch)
    assert judge(Sighting(""), Watch("", quarantined=False), 1e9) == ("keep", Watch("", False, LONGEST_STEP))
