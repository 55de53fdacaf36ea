"""Sequences of like length are attended to together: how they are grouped, and that their padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.engine.attention.sdpa import GroupedPlan

from .paged import BLOCK, Case, Paged, Problem, textbook

ALIKE = ((0, 30), (3, 28), (0, 30), (2, 24), (60, 3), (50, 4), (90, 1), (0, 30), (80, 1))
"""Prompts that are padded to one another, in among guesses of a few tokens and decodes."""


def plan_of(lengths: tuple[tuple[int, int], ...]) -> GroupedPlan:
    paged = Paged("sdpa", Case(lengths), blocks=4 * sum(-(-sum(each) // BLOCK) for each in lengths) + 1)
    return GroupedPlan(paged.batch([(paged.sequence(sum(each)), *each) for each in lengths]), BLOCK)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=8).map(tuple))
def test_every_query_is_in_one_group_of_its_like(lengths: tuple[tuple[int, int], ...]) -> None:
    plan = plan_of(lengths)
    rows = torch.cat([group.rows.unique() for group in plan.groups])
    assert sorted(rows.tolist()) == list(range(sum(count for _, count in lengths)))
    assert sum(group.size for group in plan.groups) == len(lengths)
    for group in plan.groups:
        counts = [len(each.unique()) for each in group.rows.view(group.size, group.count)]
        assert min(counts) >= 0.75 * max(counts)


def test_equal_prompts_are_one_group_and_their_rows_the_batch() -> None:
    (group,) = plan_of(((0, 16),) * 5).groups
    assert group.in_order
    assert torch.equal(group.rows, torch.arange(80))


def test_a_padded_batch_is_not_taken_for_its_own_rows() -> None:
    (group,) = plan_of(((0, 16), (0, 15))).groups
    assert not group.in_order


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_padded_queries_change_nothing(window: int | None, softcap: float | None) -> None:
    case = Case(ALIKE, group=3, window=window, softcap=softcap)
    problem = Problem.of(case)
    assert len(plan_of(ALIKE).groups) < len(ALIKE) - 3
    torch.testing.assert_close(Paged("sdpa", case).run(problem).double(), textbook(problem), rtol=1e-5, atol=1e-5)
