"""The turns of tenants: shares by weight and by tokens, no starvation, no credit for having been away."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.limiting.shares import Claimant, place, turns, virtual_time


@dataclass
class Tenant:
    """One with lines of a known length, which a simulated machine computes."""

    weight: float
    tokens: int
    lines: int
    claimant: Claimant
    active: bool = False
    done: int = 0


class Machine:
    """Slots that compute a token of a line in each step. Claims one line at a time, as a store does."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running: list[tuple[str, int]] = []
        self.tenants: dict[str, Tenant] = {}
        self.time = 0.0
        self.served: Counter[str] = Counter()
        """Tokens, by tenant."""

    def add(self, name: str, *, tokens: int, lines: int, weight: float = 1.0) -> None:
        if (tenant := self.tenants.get(name)) is None:
            self.tenants[name] = Tenant(weight, tokens, lines, Claimant(name, weight))
        else:
            tenant.lines += lines

    def step(self) -> None:
        self._join()
        while len(self.running) < self.slots and any(tenant.lines for tenant in self.tenants.values()):
            [name] = turns([tenant.claimant for tenant in self.tenants.values() if tenant.lines], 1)
            tenant = self.tenants[name]
            tenant.lines -= 1
            tenant.claimant = replace(tenant.claimant, in_flight=tenant.claimant.in_flight + 1)
            self.running.append((name, tenant.tokens))
        still = []
        for name, left in self.running:
            self.served[name] += 1
            if left > 1:
                still.append((name, left - 1))
            else:
                self._finish(self.tenants[name])
        self.running = still

    def _join(self) -> None:
        working = {name for name, tenant in self.tenants.items() if tenant.lines or tenant.claimant.in_flight}
        active = {name: place(tenant.claimant) for name, tenant in self.tenants.items() if tenant.active}
        if working != active.keys():
            self.time = virtual_time(self.time, active, working)
        for name, tenant in self.tenants.items():
            if name in working and not tenant.active:
                tenant.claimant = replace(tenant.claimant, served=max(tenant.claimant.served, self.time))
            tenant.active = name in working

    def _finish(self, tenant: Tenant) -> None:
        tenant.done += 1
        claimant = tenant.claimant
        tenant.claimant = replace(
            claimant,
            served=claimant.served + tenant.tokens / tenant.weight,
            line_tokens=float(tenant.tokens),
            in_flight=claimant.in_flight - 1,
        )


ENDLESS = 10**9


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0.5, 1.0, 2.0, 4.0])), min_size=2, max_size=5),
    st.integers(1, 16),
)
def test_tokens_are_shared_by_weight_whatever_the_length_of_lines(kinds: list[tuple[int, float]], slots: int) -> None:
    machine = Machine(slots)
    for number, (tokens, weight) in enumerate(kinds):
        machine.add(str(number), tokens=tokens, lines=ENDLESS, weight=weight)
    steps = 50 * max(tokens for tokens, _ in kinds) // slots + 200
    for _ in range(steps):
        machine.step()
    assert machine.served.total() == steps * slots
    shares = [machine.served[str(number)] / weight for number, (_, weight) in enumerate(kinds)]
    # What is in flight is the most by which any two can differ, each line counted at the longest.
    longest = max(tokens for tokens, _ in kinds)
    light = min(weight for _, weight in kinds)
    assert max(shares) - min(shares) <= 2 * (slots + len(kinds)) * longest / light


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(2, 16))
def test_who_comes_later_gets_half_of_what_is_left_from_then_on(first: int, second: int, slots: int) -> None:
    """The one who was alone owes nothing for it, and the one who was away has saved up nothing."""
    machine = Machine(slots)
    machine.add("first", tokens=first, lines=ENDLESS)
    for _ in range(200):
        machine.step()
    machine.add("second", tokens=second, lines=ENDLESS)
    before = machine.served["first"]
    steps = 20 * max(first, second)
    for _ in range(steps):
        machine.step()
    got = machine.served["first"] - before
    assert abs(got - machine.served["second"]) <= 4 * (slots + 1) * max(first, second)


def test_a_tenant_that_comes_and_goes_saves_nothing_up() -> None:
    machine = Machine(8)
    machine.add("steady", tokens=10, lines=ENDLESS)
    machine.add("rare", tokens=10, lines=1)
    for _ in range(1000):
        machine.step()
    machine.add("rare", tokens=10, lines=1000)
    before = machine.served.copy()
    for _ in range(500):
        machine.step()
    got = machine.served - before
    assert got["steady"] == pytest.approx(got["rare"], rel=0.1)


def test_after_all_have_stopped_nobody_starts_behind_who_got_most() -> None:
    assert virtual_time(5.0, {"a": 100.0, "b": 40.0}, []) == 100.0
    assert virtual_time(5.0, {"a": 100.0, "b": 40.0}, ["a", "c"]) == 100.0
    assert virtual_time(5.0, {"a": 100.0, "b": 40.0}, ["a", "b", "c"]) == 40.0
    assert virtual_time(50.0, {"a": 100.0, "b": 40.0}, ["b"]) == 50.0
    assert virtual_time(5.0, {}, ["a"]) == 5.0


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0, 1e6), st.floats(1, 1e4), st.integers(0, 500)), max_size=6),
    st.integers(0, 200),
)
def test_each_turn_goes_to_who_has_got_least(tenants: list[tuple[float, float, float, int]], lines: int) -> None:
    claimants = {str(number): Claimant(str(number), *values) for number, values in enumerate(tenants)}
    order = turns([*claimants.values()], lines)
    assert len(order) == (lines if claimants else 0)
    for tenant in order:
        chosen = claimants[tenant]
        assert place(chosen) <= min(map(place, claimants.values())) * (1 + 1e-9) + 1e-6
        claimants[tenant] = replace(chosen, in_flight=chosen.in_flight + 1)


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 8.0]), st.integers(0, 4)), max_size=4),
    st.integers(0, 40),
)
def test_turns_in_one_call_are_those_of_a_call_for_each(tenants: list[tuple[float, float, int]], lines: int) -> None:
    claimants = {
        str(number): Claimant(str(number), weight, served, 16.0, in_flight)
        for number, (weight, served, in_flight) in enumerate(tenants)
    }
    together, each = turns([*claimants.values()], lines), []
    for _ in together:
        [tenant] = turns([*claimants.values()], 1)
        each.append(tenant)
        claimants[tenant] = replace(claimants[tenant], in_flight=claimants[tenant].in_flight + 1)
    assert together == each


def test_lines_of_a_tenant_that_is_not_known_yet_count_like_those_of_the_others() -> None:
    known = Claimant("known", line_tokens=100.0, in_flight=10)
    new = Claimant("new", served=place(known))
    assert Counter(turns([known, new], 10)) == {"known": 5, "new": 5}
    assert turns([], 5) == []
    assert turns([Claimant("a"), Claimant("b", weight=3.0)], 8).count("b") == 6
