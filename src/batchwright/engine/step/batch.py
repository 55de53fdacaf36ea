"""One step's tokens as tensors: a flat row, no padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from batchwright.scheduling import Chunk


@dataclass(slots=True)
class StepBatch:
    """T tokens of S sequences, sequence after sequence; on the engine's device."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64: block · block_size + offset, where the token's key and value go."""
    query_starts: Tensor
    """[S + 1] int32: first row of each sequence."""
    context_lens: Tensor
    """[S] int32: keys of each sequence, those of this step included."""
    block_tables: Tensor
    """[S, most blocks] int32; past a sequence's end 0."""
    logit_rows: Tensor
    """[R] int64: rows whose logits are wanted, those before a sequence's drafts and of the drafts included."""
    query_lens: list[int]
    contexts: list[int]
    tables: np.ndarray
    """`block_tables` where the host can read them."""
    attention_plan: object = field(default=None)
    """Whatever the attention backend worked out once for all layers."""

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def build_batch(chunks: list[Chunk], block_size: int, device: torch.device) -> StepBatch:
    """The tensors for `chunks`, whose block tables must already have room for their tokens."""
    drafted = np.array([len(chunk.drafts) for chunk in chunks], np.int32)
    counts = np.array([chunk.count for chunk in chunks], np.int32) + drafted
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    total = int(query_starts[-1])
    tables = _block_tables(chunks)
    token_ids = _token_ids(chunks)
    owners = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(total, dtype=np.int64) - np.repeat(query_starts[:-1] - starts, counts)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    sampled = np.array([chunk.samples for chunk in chunks], np.bool_)
    logit_rows = (query_starts[1:].astype(np.int64) - 1)[sampled]
    if drafted.any():
        logit_rows = _with_drafts(logit_rows, drafted[sampled])

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return StepBatch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        query_starts=tensor(query_starts),
        context_lens=tensor(starts + counts),
        block_tables=tensor(tables),
        logit_rows=tensor(logit_rows),
        query_lens=counts.tolist(),
        contexts=(starts + counts).tolist(),
        tables=tables,
    )


def _block_tables(chunks: list[Chunk]) -> np.ndarray:
    """[S, most blocks] int32: all blocks in one row, then from there to their places."""
    blocks = [chunk.sequence.table.blocks for chunk in chunks]
    lengths = np.array([len(each) for each in blocks])
    tables = np.zeros((len(chunks), int(lengths.max())), np.int32)
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(blocks), np.int32)
    return tables


def _token_ids(chunks: list[Chunk]) -> np.ndarray:
    """[T] int64."""
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.count == 1:
            tokens.append(chunk.sequence.tokens[chunk.start])
        else:
            tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        tokens += chunk.drafts
    return np.array(tokens, np.int64)


def _with_drafts(last_rows: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """For each of `last_rows` also the `drafted` rows before it, in order."""
    counts = drafted + 1
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1]) - np.repeat(ends - 1, counts)
    rows: np.ndarray = np.repeat(last_rows, counts) + offsets
    return rows
