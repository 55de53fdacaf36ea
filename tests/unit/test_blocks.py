"""The block manager against a model of what lies in each block."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.long_form import examples

from batchwright.kv import BlockManager, BlockTable


class Clashing(int):
    """A token whose hash says nothing, so that every lookup has to compare the tokens."""

    def __hash__(self) -> int:
        return 0


_SMALL_ALPHABET = st.integers(0, 1)
_TEXTS = st.lists(_SMALL_ALPHABET, min_size=1, max_size=8)


@dataclass(eq=False)
class Holder:
    """One open table: its tokens, and how many of them lie in its blocks."""

    table: BlockTable
    tokens: list[int]
    computed: int


class BlockMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 14), block_size=st.integers(1, 3), prefix_caching=st.booleans(), clash=st.booleans()
    )
    def start(self, num_blocks: int, block_size: int, prefix_caching: bool, clash: bool) -> None:
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.size = block_size
        self.token = Clashing if clash else int
        self.holders: list[Holder] = []
        self.content: dict[int, tuple[int, ...]] = {}
        """Of each offered block: all tokens up to its end."""
        self.released: dict[int, int] = {}
        """When each free block was let go of."""
        self.time = 0

    @rule(tokens=_TEXTS, known=st.integers(0, 14), pick=st.integers(0, 99), computed=st.booleans())
    def open_and_grow(self, tokens: list[int], known: int, pick: int, computed: bool) -> None:
        """Open all of a text, half of the time one that begins like an earlier one, and perhaps compute it."""
        tokens = [self.token(token) for token in tokens]
        if self.holders and pick % 2:
            tokens = self.holders[pick % len(self.holders)].tokens[:known] + tokens
        fits = self.manager.can_open(tokens)
        free_before = self._free()
        table, cached = self.manager.open(tokens)
        assert cached == len(table) * self.size < len(tokens)
        assert self.manager.prefix_caching or cached == 0
        for index, block in enumerate(table.blocks):
            assert self.content[block] == tuple(tokens[: (index + 1) * self.size])
        hits = set(table.blocks)
        assert self._grow(table, len(tokens), free_before - hits) is fits
        if fits:
            self.holders.append(Holder(table, tokens, cached))
            if computed:
                self._publish(self.holders[-1], len(tokens))
        else:
            self._close(table)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), tokens=_TEXTS)
    def append(self, pick: int, tokens: list[int]) -> None:
        holder = self._pick(pick)
        before = list(holder.table.blocks)
        if self._grow(holder.table, len(holder.tokens) + len(tokens), self._free()):
            holder.tokens += [self.token(token) for token in tokens]
            assert len(holder.table) == self.manager.blocks_for(len(holder.tokens))
        else:
            assert list(holder.table.blocks) == before
        assert list(holder.table.blocks)[: len(before)] == before

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), count=st.integers(0, 14))
    def publish(self, pick: int, count: int) -> None:
        self._publish(self._pick(pick), count)

    def _publish(self, holder: Holder, count: int) -> None:
        holder.computed = min(len(holder.tokens), holder.computed + count)
        self.manager.publish(holder.table, holder.tokens, holder.computed)
        for index in range(holder.computed // self.size):
            block = holder.table.blocks[index]
            self.content.setdefault(block, tuple(holder.tokens[: (index + 1) * self.size]))

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), keep=st.integers(0, 14))
    def retract(self, pick: int, keep: int) -> None:
        holder = self._pick(pick)
        keep = min(keep, holder.computed)
        self.manager.retract(holder.table, keep)
        for block in list(holder.table.blocks)[keep // self.size :]:
            self.content.pop(block, None)
        shared = [other for other in self.holders if other is not holder]
        first_own = next(
            (i for i, block in enumerate(holder.table.blocks) if all(block not in o.table.blocks for o in shared)),
            len(holder.table),
        )
        # What others hold too was computed before; only what lies in its own blocks can be computed again.
        holder.computed = max(keep, min(holder.computed, first_own * self.size))

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        holder = self._pick(pick)
        self.holders.remove(holder)
        self._close(holder.table)
        assert len(holder.table) == 0

    @rule(tokens=_TEXTS, spare=st.integers(0, 3), chosen=st.sets(st.integers(0, 9)))
    def can_open_foresees_closing(self, tokens: list[int], spare: int, chosen: set[int]) -> None:
        tables = [holder.table for index, holder in enumerate(self.holders) if index in chosen]
        foreseen = self.manager.can_open(tokens, spare, without=tables)
        manager, tables = copy.deepcopy((self.manager, tables))
        for table in tables:
            manager.close(table)
        assert foreseen == manager.can_open(tokens, spare)
        table, _ = manager.open(tokens)
        assert foreseen == (manager.grow(table, len(tokens)) and manager.num_free >= spare)

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check([holder.table for holder in self.holders])
        held = {block for holder in self.holders for block in holder.table.blocks}
        assert self.manager.num_used == len(held)
        assert self.manager.num_free + self.manager.num_used == self.manager.num_blocks

    @invariant()
    def only_equal_prefixes_are_shared(self) -> None:
        owners: dict[int, tuple[int, tuple[int, ...]]] = {}
        for holder in getattr(self, "holders", []):
            for index, block in enumerate(holder.table.blocks):
                here = index, tuple(holder.tokens[: (index + 1) * self.size])
                assert owners.setdefault(block, here) == here

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for holder in self.holders:
                self.manager.close(holder.table)
            self.manager.check([])
            assert self.manager.num_free == self.manager.num_blocks

    def _pick(self, pick: int) -> Holder:
        return self.holders[pick % len(self.holders)]

    def _free(self) -> set[int]:
        return set(range(self.manager.num_blocks)) - {b for holder in self.holders for b in holder.table.blocks}

    def _grow(self, table: BlockTable, num_tokens: int, free: set[int]) -> bool:
        """Grow, and check that only free blocks were handed out: those not cached first, then the oldest."""
        before = set(table.blocks)
        cached = {block for block in free if self.manager._content_of[block] is not None}
        grown = self.manager.grow(table, num_tokens)
        new = set(table.blocks) - before
        assert new <= free
        left = free - new
        if new & cached:
            assert left <= cached
            assert max(self.released[block] for block in new & cached) < min(
                (self.released[block] for block in left), default=self.time + 1
            )
        for block in new:
            self.content.pop(block, None)
        return grown

    def _close(self, table: BlockTable) -> None:
        blocks = list(table.blocks)
        self.manager.close(table)
        held = {block for holder in self.holders for block in holder.table.blocks}
        for block in reversed(blocks):
            if block not in held:
                self.time += 1
                self.released[block] = self.time


TestBlockMachine = BlockMachine.TestCase
TestBlockMachine.settings = settings(max_examples=examples(40, long=120), stateful_step_count=40)


def _computed(manager: BlockManager, tokens: list[int]) -> BlockTable:
    table, _ = manager.open(tokens)
    assert manager.grow(table, len(tokens))
    manager.publish(table, tokens, len(tokens))
    return table


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 1), (1, 0), (-1, 4)])
def test_limits_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        BlockManager(num_blocks, block_size)


def test_the_last_token_is_left_to_compute() -> None:
    manager = BlockManager(8, 4)
    tokens = list(range(8))
    manager.close(_computed(manager, tokens))
    assert manager.open(tokens)[1] == 4
    assert manager.open([*tokens, 99])[1] == 8


def test_a_prefix_is_found_while_it_is_held_and_after_it_was_let_go() -> None:
    manager = BlockManager(8, 2)
    first = _computed(manager, [1, 2, 3, 4, 5])
    second, cached = manager.open([1, 2, 3, 4, 6])
    assert cached == 4
    assert list(second.blocks) == list(first.blocks[:2])
    manager.close(first)
    manager.close(second)
    assert manager.open([1, 2, 3, 4, 7])[1] == 4


def test_equal_tokens_after_different_prefixes_are_not_shared() -> None:
    manager = BlockManager(8, 2)
    _computed(manager, [1, 1, 5, 5])
    assert manager.open([2, 2, 5, 5, 0])[1] == 0
    assert manager.open([5, 5, 0])[1] == 0


def test_a_prefix_is_never_continued_by_blocks_that_followed_another() -> None:
    """The block after a prefix that was dropped, and computed again by another sequence, is not found through it."""
    manager = BlockManager(6, 1)
    one, two, three, four = (Clashing(token) for token in (1, 2, 3, 4))
    first = _computed(manager, [one, three])
    manager.retract(first, 0)
    second = _computed(manager, [two, four])
    assert manager.open([one, three, three])[1] == 0
    assert manager.open([two, three, three])[0].blocks[:1] == second.blocks[:1]
    assert manager.open([two, three, three])[1] == 1


def test_blocks_are_handed_out_oldest_first_and_the_ends_of_sequences_before_their_beginnings() -> None:
    manager = BlockManager(4, 1)
    older, newer = _computed(manager, [1, 2]), _computed(manager, [3, 4])
    first, second = list(older.blocks), list(newer.blocks)
    manager.close(older)
    manager.close(newer)
    table, _ = manager.open([9])
    handed_out = []
    for length in range(1, 5):
        assert manager.grow(table, length)
        handed_out.append(table.blocks[-1])
    assert handed_out == [first[1], first[0], second[1], second[0]]


def test_a_hit_makes_a_block_young_again() -> None:
    manager = BlockManager(3, 1)
    for token in (1, 2, 3):
        manager.close(_computed(manager, [token]))
    manager.close(manager.open([1, 9])[0])
    table, _ = manager.open([8])
    assert manager.grow(table, 2)
    assert manager.open([1, 9])[1] == 1


def test_blocks_without_a_cached_prefix_are_handed_out_first() -> None:
    manager = BlockManager(3, 2)
    manager.close(_computed(manager, [1, 2, 3]))
    table, _ = manager.open([7])
    assert manager.grow(table, 4)
    assert manager.open([1, 2, 3])[1] == 2


def test_only_blocks_that_all_holders_close_count_as_free() -> None:
    manager = BlockManager(4, 1)
    first = _computed(manager, [1, 2, 3])
    second = _computed(manager, [1, 2, 4])
    assert not manager.can_open([9, 9, 9], without=[second])
    assert not manager.can_open([9, 9], without=[first])
    assert manager.can_open([9, 9, 9, 9], without=[first, second])


def test_growing_hands_out_nothing_unless_it_hands_out_all() -> None:
    manager = BlockManager(3, 2)
    held = _computed(manager, [1, 2, 3])
    table, _ = manager.open([9])
    assert not manager.grow(table, 4)
    assert (len(table), manager.num_free) == (0, 1)
    manager.check([held, table])


def test_without_prefix_caching_nothing_is_shared() -> None:
    manager = BlockManager(8, 2, prefix_caching=False)
    manager.close(_computed(manager, [1, 2, 3, 4, 5]))
    assert manager.open([1, 2, 3, 4, 5])[1] == 0


def test_a_retracted_block_is_not_found_and_the_ones_before_it_are() -> None:
    manager = BlockManager(8, 2)
    table = _computed(manager, [1, 2, 3, 4, 5, 6])
    manager.retract(table, 3)
    assert manager.open([1, 2, 3, 4, 5, 6, 7])[1] == 2
    manager.publish(table, [1, 2, 3, 4, 5, 6], 6)
    assert manager.open([1, 2, 3, 4, 5, 6, 7])[1] == 6


def test_a_copy_of_a_published_block_can_be_dropped_without_harm_to_the_published_one() -> None:
    manager = BlockManager(8, 2)
    first, _ = manager.open([1, 2, 3])
    second, _ = manager.open([1, 2, 3])
    for table in (first, second):
        assert manager.grow(table, 3)
        manager.publish(table, [1, 2, 3], 2)
    manager.retract(second, 0)
    manager.close(second)
    hit, cached = manager.open([1, 2, 3])
    assert cached == 2
    assert hit.blocks[0] == first.blocks[0]


@pytest.mark.parametrize("harm", ["reference", "free", "twice", "published"])
def test_check_sees_broken_invariants(harm: str) -> None:
    manager = BlockManager(4, 2)
    table = _computed(manager, [1, 2, 3])
    if harm == "reference":
        manager._references[table.blocks[0]] += 1
    elif harm == "free":
        manager._free[table.blocks[0]] = None
    elif harm == "twice":
        table.blocks.append(table.blocks[0])
    else:
        manager._content_of[table.blocks[0]] = None
    with pytest.raises(RuntimeError):
        manager.check([table])


def test_blocks_that_are_of_no_more_use_are_handed_out_before_any_others() -> None:
    manager = BlockManager(100, 2)
    table = _computed(manager, [1, 2, 3, 4, 5, 6])
    first, *rest = list(table.blocks)
    manager.close(table, useful=1)
    for token in range(20):
        table = _computed(manager, [10 + token, 0, 0, 0])
        assert set(table.blocks) == set(rest)
        manager.close(table, useful=0)
    assert list(manager.open([1, 2, 9])[0].blocks) == [first]
