"""After a death: how many suspects are computed together, and who fails in the end. Any interleaving of workers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.policies.suspects import MAX_CRASHES, PATIENCE, Suspects, at_once, first, worth_draining


def test_companies_shrink_to_one() -> None:
    assert at_once(1, 256, alone=False, most=3) == 16
    assert at_once(2, 16, alone=False, most=3) == 1
    assert at_once(3, 1, alone=True, most=3) == 0
    assert [at_once(crashes, lines, alone=False, most=4) for crashes, lines in ((1, 4096), (2, 256), (3, 16))] == [
        256,
        16,
        1,
    ]
    assert at_once(1, 1, alone=False, most=3) == at_once(1, 1, alone=True, most=3) == 1


@given(st.integers(1, 10), st.integers(1, 10_000), st.integers(2, 10))
def test_no_line_fails_in_company(crashes: int, lines: int, most: int) -> None:
    assert 1 <= at_once(crashes, lines, alone=False, most=most) <= lines
    assert (at_once(crashes, 1, alone=True, most=most) == 0) == (crashes >= most)
    if crashes >= most - 1:
        assert at_once(crashes, lines, alone=False, most=most) == 1


def group(key: int, since: float, **rest: object) -> Suspects:
    values: dict[str, object] = {"tenant": "t", "at_once": 4, "taker": None, **rest}
    return Suspects(key=key, since=since, **values)  # type: ignore[arg-type]


def test_who_waited_longest_is_tried_first_and_who_rests_last() -> None:
    groups = [group(1, 20.0), group(2, 10.0, rests_until=50.0), group(3, 15.0, at_once=0)]
    assert first(groups, 30.0) == groups[0]
    assert first(groups, 30.0, resting=True) == groups[1]
    assert first(groups, 50.0) == groups[1]
    assert first(groups[2:], 50.0, resting=True) is None


def test_one_worker_at_most_leaves_other_lines_for_suspects_and_only_after_a_while() -> None:
    waiting = group(1, 10.0)
    assert worth_draining([waiting], "w", 10.0 + PATIENCE - 1) is None
    assert worth_draining([waiting], "w", 10.0 + PATIENCE) == waiting
    assert worth_draining([group(1, 10.0, taker="other")], "w", 1e9) is None
    assert worth_draining([group(1, 10.0, taker="w")], "w", 10.0) is not None
    assert worth_draining([group(1, 10.0, rests_until=1e9)], "w", 1e6) is None


@dataclass
class Crash:
    at_once: int
    lines: set[int]


@dataclass
class Process:
    """What it has in progress; `trying`: the crash whose suspects it computes."""

    work: set[int] = field(default_factory=set)
    trying: Crash | None = None


@dataclass
class Fleet:
    """Processes that compute lines, some of which kill; everything else is drawn. The rule decides who is computed."""

    draw: random.Random
    poison: set[int]
    lines: set[int]
    slots: int
    most: int = MAX_CRASHES
    processes: list[Process] = field(default_factory=list)
    crashes: list[Crash] = field(default_factory=list)
    times: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    deaths: int = 0

    def step(self) -> None:
        process = self.draw.choice(self.processes)
        self._claim(process)
        if not process.work:
            return
        line = self.draw.choice(sorted(process.work))
        if line in self.poison:
            self._die(process)
        else:
            process.work.remove(line)
            self.done.add(line)

    def _claim(self, process: Process) -> None:
        if process.trying is None and not process.work and (crash := self._suspects()):
            process.trying = crash
        if process.trying is None:
            if any(crash.lines for crash in self.crashes) and self.draw.random() < 0.5:
                return  # it drains
            new = sorted(self.lines)[: self.slots - len(process.work)]
            self.lines -= {*new}
        else:
            new = sorted(process.trying.lines)[: process.trying.at_once - len(process.work)]
            process.trying.lines -= {*new}
        process.work |= {*new}
        if not process.work:
            process.trying = None

    def _suspects(self) -> Crash | None:
        waiting = [crash for crash in self.crashes if crash.lines]
        return self.draw.choice(waiting) if waiting else None

    def _die(self, process: Process) -> None:
        self.deaths += 1
        lines, alone = {*process.work}, process.trying is not None and process.trying.at_once == 1
        assert not alone or len(lines) == 1
        for line in lines:
            self.times[line] = self.times.get(line, 0) + 1
        [crashes] = {self.times[line] for line in lines}
        allowed = at_once(crashes, len(lines), alone=alone, most=self.most)
        process.work, process.trying = set(), None
        if allowed:
            self.crashes.append(Crash(allowed, lines))
        else:
            self.failed |= lines


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(2, 5),
)
def test_lines_that_kill_fail_and_no_others_in_any_order(
    seed: int, lines: int, poison: int, processes: int, slots: int, most: int
) -> None:
    draw = random.Random(seed)
    killers = {*draw.sample(range(lines), min(poison, lines))}
    fleet = Fleet(draw, killers, {*range(lines)}, slots, most, [Process() for _ in range(processes)])
    while len(fleet.done) + len(fleet.failed) < lines:
        fleet.step()
    assert fleet.failed == killers
    assert all(fleet.times[line] == most for line in killers)
    # Each of them kills at most as often as it may, in whatever company.
    assert fleet.deaths <= most * len(killers)


@pytest.mark.parametrize("most", [2, 3, 4])
def test_few_deaths_and_few_lines_alone_find_one_among_many(most: int) -> None:
    draw = random.Random(7)
    fleet = Fleet(draw, {117}, {*range(256)}, 256, most, [Process()])
    while len(fleet.done) < 255 or not fleet.failed:
        fleet.step()
    assert (fleet.failed, fleet.deaths) == ({117}, most)
