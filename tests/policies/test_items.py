"""What holds for every `Item`: its identity, and when it may be held back."""

from __future__ import annotations

import math

import pytest

from batchwright.batcher.entry import Entry
from batchwright.policies import AtOnce, Backlog, BySize, Item, MaxWait, Policy, Timing


def test_items_are_equal_only_to_themselves() -> None:
    first, second = Item(1.0, 2), Item(1.0, 2)
    assert first != second
    assert len({first, second, first}) == 2


@pytest.mark.parametrize("timing", [AtOnce(), MaxWait(9.0)])
def test_an_item_is_held_back_for_as_long_as_it_says(timing: Timing) -> None:
    waiting = Backlog(Policy(BySize(8), timing=timing))
    item = Item(1.0, max_wait=2.0)
    waiting.add((item,))
    assert item.release == 3.0


def test_an_item_that_does_not_say_is_not_held_back_by_one_beside_it_that_does() -> None:
    waiting = Backlog(Policy(BySize(8), timing=AtOnce()))
    plain = Item(1.0)
    waiting.add((Item(1.0, max_wait=2.0), plain))
    assert plain.release == -math.inf


def test_the_prompt_of_an_entry_is_not_in_its_representation() -> None:
    entry = Entry(0.0, future=None, prompt="secret")  # type: ignore[arg-type]
    assert "secret" not in repr(entry)
