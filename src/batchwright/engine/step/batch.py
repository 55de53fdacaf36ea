"""The tokens of one step as tensors: a flat row without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.scheduling import Chunk


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Tokens that some of the logit rows may choose."""

    places: npt.NDArray[np.int32]
    """Index of each logit row's mask in `bits`, -1 if it has none: [R]."""
    bits: npt.NDArray[np.int32]
    """Masks, one bit for each token: [masks, words]."""

    @classmethod
    def of(cls, has_mask: Sequence[bool], bits: npt.NDArray[np.int32]) -> RowMasks:
        """Return the masks of the logit rows that have one, in row order."""
        having = np.array(has_mask, np.bool_)
        return cls(np.where(having, np.cumsum(having) - 1, -1).astype(np.int32), np.ascontiguousarray(bits))


@dataclass(slots=True)
class StepBatch:
    """T tokens of S sequences, one sequence after the other, on the engine's device."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """Places for the keys and values, block · block_size + offset: [T] int64."""
    query_starts: Tensor
    """First row of each sequence, and T: [S + 1] int32."""
    context_lens: Tensor
    """Keys of each sequence, including those of this step: [S] int32."""
    block_tables: Tensor
    """Blocks of each sequence, 0 past its end: [S, most blocks] int32."""
    logit_rows: Tensor
    """Rows whose logits are wanted, ascending, including those of drafts, of the token before them, and of scored
    positions: [R] int64."""
    query_lens: list[int]
    contexts: list[int]
    tables: np.ndarray
    """Copy of `block_tables` that the host can read."""
    masks: RowMasks | None = None
    """Tokens that the logit rows may choose, for bodies that find the likeliest tokens themselves; None: any."""
    attention_plan: object = None
    """What the attention backend computed once for all layers."""

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def build_batch(chunks: list[Chunk], block_size: int, device: torch.device) -> StepBatch:
    """Return the tensors of a step of `chunks`, whose block tables must already have room for their tokens."""
    drafted = np.array([len(chunk.drafts) for chunk in chunks], np.int32)
    counts = np.array([chunk.count for chunk in chunks], np.int32) + drafted
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    sampled = np.array([chunk.samples for chunk in chunks], np.bool_)
    logit_rows = np.cumsum(counts, dtype=np.int64)[sampled] - 1
    if any(chunk.scored for chunk in chunks):
        logit_rows = _with_scored(chunks, np.cumsum(counts) - counts)
    elif drafted.any():
        logit_rows = _with_drafts(logit_rows, drafted[sampled])
    return batch_of(_token_ids(chunks), counts, starts, _block_tables(chunks), logit_rows, block_size, device)


def batch_of(
    token_ids: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    tables: np.ndarray,
    logit_rows: np.ndarray,
    block_size: int,
    device: torch.device,
) -> StepBatch:
    """Return the batch of S sequences, each with `counts` [S] int32 tokens after `starts` [S] int32 earlier ones.

    `token_ids` [T] int64, `tables` [S, most blocks] int32 and `logit_rows` [R] int64 are those of `StepBatch`.
    """
    query_starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(token_ids), dtype=np.int64) - np.repeat(query_starts[:-1] - starts, counts)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size

    token_ids_there, positions_there, slots_there, logit_rows_there = _all_on_device(
        [token_ids, positions, slots, logit_rows], device
    )
    query_starts_there, contexts_there, tables_there = _all_on_device([query_starts, starts + counts, tables], device)
    return StepBatch(
        token_ids=token_ids_there,
        positions=positions_there,
        slots=slots_there,
        query_starts=query_starts_there,
        context_lens=contexts_there,
        block_tables=tables_there,
        logit_rows=logit_rows_there,
        query_lens=counts.tolist(),
        contexts=(starts + counts).tolist(),
        tables=tables,
    )


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return a tensor of `values` on `device`, without waiting for its pending work.

    CUDA would copy memory that is not pinned only after all earlier work.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


_ALIGNED = 64
"""Alignment in bytes of the parts of one copy: kernels are compiled for aligned addresses."""


def _all_on_device(parts: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return tensors of `parts`, all of one dtype; on devices other than the CPU they share one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(part) for part in parts]
    step = _ALIGNED // parts[0].itemsize
    begins = np.cumsum([0, *(-(-part.size // step) * step for part in parts)]).tolist()
    flat = np.zeros(begins[-1], parts[0].dtype)
    for part, begin in zip(parts, begins, strict=False):
        flat[begin : begin + part.size] = part.ravel()
    there = on_device(flat, device)
    return [there[begin : begin + part.size].view(part.shape) for part, begin in zip(parts, begins, strict=False)]


def _block_tables(chunks: list[Chunk]) -> np.ndarray:
    """Return the block tables, copied all at once -> [S, most blocks] int32."""
    blocks = [chunk.sequence.table.blocks for chunk in chunks]
    lengths = np.array([len(each) for each in blocks])
    tables = np.zeros((len(chunks), int(lengths.max())), np.int32)
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(blocks), np.int32)
    return tables


def _token_ids(chunks: list[Chunk]) -> np.ndarray:
    """Return the tokens of `chunks`, each followed by its drafts -> [T] int64."""
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.count == 1:
            tokens.append(chunk.sequence.tokens[chunk.start])
        else:
            tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        tokens += chunk.drafts
    return np.array(tokens, np.int64)


def _with_scored(chunks: list[Chunk], firsts: np.ndarray) -> np.ndarray:
    """Return the rows of the scored positions of `chunks`, which begin at the rows `firsts`, and all other rows."""
    parts = []
    for chunk, first in zip(chunks, firsts, strict=True):
        parts.append(np.arange(chunk.scored.start, chunk.scored.stop) - chunk.start + first)
        if chunk.samples:
            parts.append(np.arange(chunk.count - 1, chunk.count + len(chunk.drafts)) + first)
    return np.concatenate(parts).astype(np.int64)


def _with_drafts(last_rows: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """Return each of `last_rows` after the `drafted` rows that precede it."""
    counts = drafted + 1
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1]) - np.repeat(ends - 1, counts)
    rows: np.ndarray = np.repeat(last_rows, counts) + offsets
    return rows
