"""Blocks of consecutive items, each with the same chance to be kept, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.jobs.block_sample import BlockSample


def sampled(count: int, most_items: int, sizes: list[int] | None = None, most_bytes: int = 2**20) -> list[int]:
    sample = BlockSample[int](most_items, most_bytes)
    for number in range(count):
        if sample.wants_next():
            sample.add(number, 1 if sizes is None else sizes[number % len(sizes)])
    assert sample.seen == count
    return sample.items


@given(st.integers(0, 700))
def test_few_items_are_all_kept(count: int) -> None:
    assert sampled(count, 704) == list(range(count))


@given(st.integers(129, 3000))
def test_many_are_kept_in_blocks_and_in_order(count: int) -> None:
    kept = sampled(count, 128)
    assert kept == sorted(set(kept))
    blocks = Counter(number // 64 for number in kept)
    assert len(blocks) == 2
    assert all(number == 64 or block == (count - 1) // 64 for block, number in blocks.items())


def test_all_blocks_have_the_same_chance() -> None:
    found = Counter[int]()
    for seed in range(400):
        sample = BlockSample[int](640, 2**20)
        sample._draw = random.Random(seed)
        for number in range(6400):
            if sample.wants_next():
                sample.add(number, 1)
        found.update(number // 640 for number in sample.items)
    assert min(found.values()) > 0.8 * max(found.values())


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_memory_is_bounded_whatever_the_sizes(sizes: list[int]) -> None:
    kept = sampled(2000, 256, sizes, most_bytes=8000)
    assert sum(sizes[number % len(sizes)] for number in kept) <= 8000 + 4 * max(sizes)


def test_a_sample_holds_a_block_at_least() -> None:
    with pytest.raises(ValueError, match="at least 64"):
        BlockSample[int](63, 1000)
