"""Slots: never empty while somebody waits, given by order, and nobody lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchwright.policies import FairShare, Fifo, Item, Order, Urgency
from batchwright.policies.slots import Slots


class SlotsMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 4), order=st.sampled_from([Fifo, Urgency, FairShare]))
    def begin(self, size: int, order: type[Order]) -> None:
        self.slots = Slots(size, order())
        self.waiting: list[Item] = []
        self.live: list[Item] = []
        self.now = 0.0

    @rule(priority=st.integers(0, 9), length=st.integers(1, 50), tenant=st.integers(0, 2), late=st.floats(0, 5))
    def come(self, priority: int, length: int, tenant: int, late: float) -> None:
        self.now += late
        item = Item(self.now, length, priority=priority, tenant=tenant)
        self.slots.add(item)
        self.waiting.append(item)

    @rule()
    def step(self) -> None:
        placed = self.slots.fill()
        assert len(placed) == min(len(self.waiting), self.slots.size - len(self.live))
        expected = sorted(self.waiting, key=lambda item: item.key)[: len(placed)]
        assert list(placed) == expected
        self.live += placed
        self.waiting = [item for item in self.waiting if item not in expected]
        assert len(self.live) == self.slots.size or not self.waiting

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        here = self.waiting + self.live
        if here:
            item = data.draw(st.sampled_from(here))
            assert self.slots.remove(item)
            assert not self.slots.remove(item)
            (self.waiting if item in self.waiting else self.live).remove(item)

    @rule()
    def leave_all(self) -> None:
        assert set(self.slots.clear()) == set(self.waiting + self.live)
        self.waiting, self.live = [], []

    @invariant()
    def nobody_is_lost(self) -> None:
        if hasattr(self, "slots"):
            assert len(self.slots) == len(self.waiting) + len(self.live)
            assert list(self.slots.live) == self.live
            assert self.slots.waiting_length == sum(item.length for item in self.waiting)


SlotsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestSlots = SlotsMachine.TestCase


def test_a_size_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0"):
        Slots(0)
