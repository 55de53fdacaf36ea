"""Ragged attention problems, run through a backend in a cache whose every other block is full of NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchwright.engine.attention import AttentionBackend, AttentionShape, KVShape, LayerCache, choose_attention
from batchwright.engine.attention.native import NativeAttention
from batchwright.engine.native import load_kernels
from batchwright.engine.native.kernels import ARGUMENTS
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.kv import BlockManager
from batchwright.scheduling import Chunk, Sequence

BLOCK = 16
CPU = torch.device("cpu")


class EightBits(NativeAttention):
    """Keys and values in 8 bits beside bfloat16, as only the compiled layers have them."""

    def __init__(self, case: Case) -> None:
        kernels = load_kernels(torch.bfloat16)
        assert not isinstance(kernels, str)
        super().__init__(kernels)
        self._case = case

    def allocate(self, shape: KVShape) -> LayerCache:
        return super().allocate(replace(shape, quantized=True))

    def store(self, key: Tensor, value: Tensor, cache: LayerCache, batch: StepBatch) -> None:
        k, v = key.contiguous(), value.contiguous()
        sizes = (len(k), k.stride(0), v.stride(0), self._case.kv_heads, self._case.head_dim)
        self._call("store_rows", k, v, *sizes, batch.slots, cache.keys, cache.values)

    def attend(self, query: Tensor, cache: LayerCache, shape: AttentionShape, batch: StepBatch) -> Tensor:
        case, out = self._case, torch.empty(len(query), query.shape[1], dtype=query.dtype)
        sizes = (batch.num_sequences, query.stride(0), batch.block_tables.stride(0), shape.heads, case.kv_heads)
        tensors = (query, cache.keys, cache.values, out, batch.block_tables, batch.query_starts, batch.context_lens)
        self._call("attend", *tensors, *sizes, case.head_dim, shape.window or 0, shape.scale, shape.softcap or 0.0)
        return out

    def _call(self, name: str, *given: Tensor | float) -> None:
        function = getattr(self.kernels.library, f"bw_{name}_int8")
        function.argtypes, function.restype = ARGUMENTS[name], None
        function(*(each.data_ptr() if isinstance(each, Tensor) else each for each in given))


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
    """A backend, or "8 bits", with a cache whose blocks come in a mixed order, full of NaN that nobody may read."""

    def __init__(self, name: str, case: Case, blocks: int = 200, device: torch.device = CPU) -> None:
        shape = KVShape(blocks, BLOCK, case.kv_heads, case.head_dim, case.dtype, device)
        self.case, self.device = case, device
        self.backend: AttentionBackend = EightBits(case) if name == "8 bits" else choose_attention(name, shape)
        self.cache: LayerCache = self.backend.allocate(shape)
        for tensor in (self.cache.keys, self.cache.values):
            tensor.view(torch.uint8).fill_(0xFF)  # NaN
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
