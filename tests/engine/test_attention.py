"""Every attention implementation against the textbook, over ragged batches of any shape."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import long_form

from batchwright.engine.attention import KVShape, choose_attention
from batchwright.engine.native import load_kernels
from batchwright.scheduling import Sequence

from .paged import BLOCK, CPU, Case, Paged, Problem, textbook

KERNELS = load_kernels(torch.float32)
pytestmark = pytest.mark.usefixtures("two_threads")
needs_native = pytest.mark.skipif(isinstance(KERNELS, str), reason=f"no compiled kernels: {KERNELS}")
FAST = [pytest.param("native", marks=needs_native), "sdpa"]


cases = st.builds(
    Case,
    lengths=st.lists(
        st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 70))), min_size=1, max_size=6
    ).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 13, 50]),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 256]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.sampled_from([2.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


@pytest.mark.parametrize("name", ["reference", *FAST])
@settings(max_examples=long_form.examples(25, long=60), deadline=None)
@given(case=cases)
def test_equal_to_the_textbook(name: str, case: Case) -> None:
    problem = Problem.of(case)
    ours = Paged(name, case).run(problem)
    assert ours.dtype == case.dtype
    assert ours.is_contiguous()
    tolerance = 1e-5 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=tolerance, atol=tolerance)


@needs_native
@settings(max_examples=long_form.examples(25, long=60), deadline=None)
@given(case=cases)
def test_in_8_bits(case: Case) -> None:
    """As close to the textbook as keys and values that are rounded to 8 bits can be."""
    case = in_8_bits(case)
    problem = Problem.of(case)
    exact = textbook(problem)
    for tensors in (problem.keys, problem.values):
        for index, each in enumerate(tensors):
            scales = each.float().abs().amax(-1, keepdim=True) / 127
            tensors[index] = ((each.float() / scales).round() * scales).to(torch.float64)
    ours = Paged("8 bits", case).run(Problem.of(case)).double()
    torch.testing.assert_close(ours, textbook(problem), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(ours, exact, rtol=0.1, atol=0.1)


@needs_native
@pytest.mark.parametrize("sink", [0, 1000])
def test_small_weights_in_8_bits(sink: int) -> None:
    """Nine tenths of the weight are on a key whose value is 0, the rest on thousands of keys in other chunks."""
    case = Case(((4000, 1),), dtype=torch.bfloat16)
    problem = Problem.of(case)
    problem.queries[0][-1] = 1.0
    problem.keys[0] *= 0.01
    problem.keys[0][sink] = 1.87  # exp(1.87 · √32) is 9 times 4,000
    problem.values[0] = 1.0 + problem.values[0] * 0.1
    problem.values[0][sink] = 0.0
    ours = Paged("8 bits", case, blocks=600).run(problem)
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=2e-2, atol=0.0)


def in_8_bits(case: Case) -> Case:
    return replace(case, dtype=torch.bfloat16)


@needs_native
@pytest.mark.parametrize("name", ["native", "8 bits"])
@settings(max_examples=long_form.examples(20, long=40), deadline=None)
@given(case=cases, cuts=st.lists(st.integers(1, 60), max_size=12))
def test_a_row_is_bitwise_the_same_in_any_company_and_chunking(name: str, case: Case, cuts: list[int]) -> None:
    case = in_8_bits(case) if name == "8 bits" else case
    problem = Problem.of(case)
    together = Paged(name, case).run(problem)
    row = 0
    for index, (before, count) in enumerate(case.lengths):
        alone = replace(case, lengths=((before, count),))
        paged = Paged(name, alone)
        sequence = paged.sequence(before + count)
        parts, at = [], 0
        for size in [*cuts, before + count]:
            size = min(size, before + count - at)
            if size:
                parts.append(paged.attend(problem, [(sequence, index, at, size)]))
            at += size
        assert torch.equal(torch.cat(parts)[before:], together[row : row + count])
        row += count


@st.composite
def family(draw: st.DrawFn) -> tuple[Case, list[int]]:
    """Sequences, and how many blocks each has in common with the one before it."""
    case = draw(cases)
    lengths = draw(st.lists(st.tuples(st.integers(100, 420), st.sampled_from([1, 1, 1, 1, 3])), min_size=2, max_size=9))
    common = [0]
    for (before, _), (after, _) in pairwise(lengths):
        common.append(min(draw(st.sampled_from([0, 7, 8, 16, 25])), before // BLOCK, after // BLOCK))
    return replace(case, lengths=tuple(lengths)), common


@needs_native
@pytest.mark.parametrize("name", ["native", "8 bits"])
@settings(max_examples=long_form.examples(30, long=60), deadline=None)
@given(drawn=family())
def test_a_row_is_bitwise_the_same_beside_sequences_that_begin_with_the_same_blocks(
    name: str, drawn: tuple[Case, list[int]]
) -> None:
    case, common = drawn
    case = in_8_bits(case) if name == "8 bits" else case
    problem = Problem.of(case)
    paged = Paged(name, case, blocks=400)
    family: list[Sequence] = []
    for index, (total, same) in enumerate(zip(case.totals, common, strict=True)):
        sequence = paged.sequence(total)
        if same:
            sequence.table.blocks[:same] = family[-1].table.blocks[:same]
            for tensors in (problem.keys, problem.values):
                tensors[index][: same * BLOCK] = tensors[index - 1][: same * BLOCK]
        paged.attend(problem, [(sequence, index, 0, total)])
        family.append(sequence)
    parts = [(family[i], i, before, count) for i, (before, count) in enumerate(case.lengths)]
    together = paged.attend(problem, parts)
    assert torch.equal(together, torch.cat([paged.attend(problem, [part]) for part in parts]))


@pytest.mark.parametrize("name", ["reference", *FAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["queries", "keys", "values"])
def test_nan_reaches_the_output_of_its_own_sequence_alone(name: str, dtype: torch.dtype, where: str) -> None:
    case = Case(((40, 1), (50, 1), (0, 30), (70, 5)), dtype=dtype)
    clean = Paged(name, case).run(Problem.of(case))
    starts = [0, 1, 2, 32, 37]
    for poisoned in range(4):
        problem = Problem.of(case)
        before, _ = case.lengths[poisoned]
        getattr(problem, where)[poisoned][before if where == "queries" else 0, 0, 3] = math.nan
        ours = Paged(name, case).run(problem)
        rows = slice(starts[poisoned], starts[poisoned + 1])
        assert ours[rows].isnan().any(-1)[-1 if where != "queries" else 0]
        ours[rows] = clean[rows]
        assert torch.equal(ours, clean)


@pytest.mark.parametrize("name", ["reference", *FAST])
@pytest.mark.parametrize("window", [None, 3])
def test_what_an_earlier_owner_left_in_a_block_is_not_read(name: str, window: int | None) -> None:
    """`Paged` fills its cache with NaN: every length up to two blocks must come out finite."""
    case = Case(tuple((length, 1) for length in range(34)), window=window)
    assert Paged(name, case).run(Problem.of(case)).isfinite().all()


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_large_scores_do_not_overflow(name: str) -> None:
    case = Case(((300, 1), (0, 40)))
    problem = Problem.of(case)
    problem.queries = [q * 200 for q in problem.queries]
    ours = Paged(name, case).run(problem)
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=2e-3, atol=2e-3)


def test_unknown_attention() -> None:
    shape = KVShape(4, BLOCK, 1, 16, torch.float32, CPU)
    with pytest.raises(
        ValueError, match="attention='flash': must be one of auto, native, fa3, triton, sdpa, reference"
    ):
        choose_attention("flash", shape)
