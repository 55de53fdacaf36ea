"""Every attention implementation against the reference, over ragged batches of any shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchwright.engine.attention import AttentionBackend, AttentionShape, KVShape, LayerCache, choose_attention
from batchwright.engine.batch import StepBatch, build_batch
from batchwright.engine.native import load_kernels
from batchwright.kv import BlockManager
from batchwright.scheduling import Chunk, Sequence

BLOCK = 16
CPU = torch.device("cpu")

KERNELS = load_kernels(torch.float32)
needs_native = pytest.mark.skipif(isinstance(KERNELS, str), reason=f"no compiled kernels: {KERNELS}")
FAST = [pytest.param("native", marks=needs_native), "sdpa"]


@dataclass(frozen=True)
class Case:
    """Sequences as (tokens computed before, tokens of this step), and what attends to them."""

    lengths: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.kv_heads * self.group, self.head_dim**-0.5, self.window, self.softcap)

    @property
    def totals(self) -> list[int]:
        return [before + count for before, count in self.lengths]


cases = st.builds(
    Case,
    lengths=st.lists(
        st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 70))), min_size=1, max_size=6
    ).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8]),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.sampled_from([2.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)


@dataclass
class Problem:
    """Keys and values of whole sequences, and queries for all their positions."""

    case: Case
    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def random(total: int, heads: int) -> Tensor:
            return torch.randn(total, heads, case.head_dim, generator=generator).to(case.dtype)

        heads = case.kv_heads * case.group
        return cls(
            case,
            [random(total, heads) for total in case.totals],
            [random(total, case.kv_heads) for total in case.totals],
            [random(total, case.kv_heads) for total in case.totals],
        )


class Paged:
    """One backend with a cache whose blocks are handed out in a mixed order, full of NaN that nobody may read."""

    def __init__(self, name: str, case: Case, blocks: int = 200, device: torch.device = CPU) -> None:
        shape = KVShape(blocks, BLOCK, case.kv_heads, case.head_dim, case.dtype, device)
        self.case, self.device = case, device
        self.backend: AttentionBackend = choose_attention(name, shape)
        self.cache: LayerCache = self.backend.allocate(shape)
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        self.blocks = BlockManager(blocks, BLOCK, prefix_caching=False)

    def sequence(self, total: int) -> Sequence:
        sequence = Sequence([0] * total, total, total)
        spacer = Sequence([0], 1, 1)
        for size in range(BLOCK, total + BLOCK, BLOCK):
            self.blocks.grow(sequence.table, min(size, total))
            self.blocks.grow(spacer.table, size)
        self.blocks.close(spacer.table)
        return sequence

    def attend(self, problem: Problem, parts: list[tuple[Sequence, int, int, int]]) -> Tensor:
        """Store and attend to `(sequence, its index in the problem, start, count)` in one step."""
        batch = self.batch([(sequence, start, count) for sequence, _, start, count in parts])

        def rows(tensors: list[Tensor]) -> Tensor:
            return torch.cat([tensors[index][start : start + count] for _, index, start, count in parts]).to(
                self.device
            )

        self.backend.store(rows(problem.keys), rows(problem.values), self.cache, batch)
        return self.backend.attend(rows(problem.queries).flatten(1), self.cache, self.case.shape, batch).cpu()

    def batch(self, parts: list[tuple[Sequence, int, int]]) -> StepBatch:
        return build_batch([Chunk(s, start, count, False, True) for s, start, count in parts], BLOCK, self.device)

    def run(self, problem: Problem) -> Tensor:
        """Each sequence's earlier tokens in a step of their own, then one step for all."""
        sequences = [self.sequence(total) for total in self.case.totals]
        parts = []
        for index, (sequence, (before, count)) in enumerate(zip(sequences, self.case.lengths, strict=True)):
            if before:
                self.attend(problem, [(sequence, index, 0, before)])
            parts.append((sequence, index, before, count))
        return self.attend(problem, parts)


def textbook(problem: Problem) -> Tensor:
    """Attention of this step's queries with nothing paged, in float64."""
    case, rows = problem.case, []
    for index, (before, count) in enumerate(case.lengths):
        q = problem.queries[index][before:].double().transpose(0, 1)
        k = problem.keys[index].double().transpose(0, 1).repeat_interleave(case.group, 0)
        v = problem.values[index].double().transpose(0, 1).repeat_interleave(case.group, 0)
        scores = q @ k.transpose(1, 2) * case.shape.scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        at = torch.arange(before, before + count)[:, None]
        key = torch.arange(before + count)[None, :]
        hidden = (key > at) | (key <= at - (case.window or 10**9))
        rows.append((scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["reference", *FAST])
@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_equal_to_the_textbook(name: str, case: Case) -> None:
    problem = Problem.of(case)
    ours = Paged(name, case).run(problem)
    assert ours.dtype == case.dtype
    assert ours.is_contiguous()
    tolerance = 1e-5 if case.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), textbook(problem), rtol=tolerance, atol=tolerance)


@needs_native
@settings(max_examples=40, deadline=None)
@given(case=cases, cuts=st.lists(st.integers(1, 60), max_size=12))
def test_a_row_is_bitwise_the_same_in_any_company_and_chunking(case: Case, cuts: list[int]) -> None:
    problem = Problem.of(case)
    together = Paged("native", case).run(problem)
    row = 0
    for index, (before, count) in enumerate(case.lengths):
        alone = replace(case, lengths=((before, count),))
        paged = Paged("native", alone)
        sequence = paged.sequence(before + count)
        parts, at = [], 0
        for size in [*cuts, before + count]:
            size = min(size, before + count - at)
            if size:
                parts.append(paged.attend(problem, [(sequence, index, at, size)]))
            at += size
        assert torch.equal(torch.cat(parts)[before:], together[row : row + count])
        row += count


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
    with pytest.raises(ValueError, match="attention='flash': must be one of auto, native, sdpa, reference"):
        choose_attention("flash", shape)
