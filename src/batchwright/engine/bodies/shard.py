"""The part of a model that one rank of several computes, and what the ranks sum and join.

Query heads are on the same rank as the KV head that they share, so that keys and values are stored on one rank only;
the MLP is divided by its intermediate channels, the vocabulary by its tokens. Parts may differ in size: two ranks get 1
and 2 of 3 KV heads. Each rank computes some outputs of q, k, v, gate and up, which are its inputs of the two products
that follow; the sums of these over all ranks are the layer's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from batchwright.engine.bodies.ops import HeadShape
from batchwright.engine.bodies.weights import Part
from batchwright.errors import UnsupportedModel

_UNITS = (64, 16, 1)
"""Numbers of channels, one of which divides each part: kernels are fastest with whole vectors, or need them."""


class RankUnreachable(Exception):
    """A sum or a join over the ranks failed: another rank is gone, or did not take part in time."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of the `ranks` ranks in torch's default process group. With one rank, everything."""

    rank: int = 0
    ranks: int = 1

    @property
    def is_whole(self) -> bool:
        return self.ranks == 1

    def part(self, number: int, rank: int | None = None) -> Part:
        """Return the part of this rank, or of `rank`, of `number` items that are divided as evenly as possible."""
        at = self.rank if rank is None else rank
        return Part(number * at // self.ranks, number * (at + 1) // self.ranks)

    def channels(self, number: int) -> Part:
        """Return the part of this rank of `number` channels, made of whole vectors if there are enough of them."""
        unit = next((unit for unit in _UNITS if number % unit == 0 and number // unit >= self.ranks), 1)
        return self.part(number // unit).scaled(unit)

    def heads(self, shape: HeadShape, rank: int | None = None) -> HeadShape:
        """Return the numbers of heads of this rank, or of `rank`, in a model whose layers have `shape`."""
        kv_heads = self.part(shape.kv_heads, rank).size
        return HeadShape(kv_heads * (shape.heads // shape.kv_heads), kv_heads, shape.head_dim)

    def require_heads(self, shape: HeadShape) -> None:
        """Raise `UnsupportedModel` if there is no KV head for each rank."""
        if self.ranks > shape.kv_heads:
            raise UnsupportedModel(
                f"tensor_parallel={self.ranks}: each rank needs a KV head of its own, and this model has "
                f"{shape.kv_heads} (num_key_value_heads); give {shape.kv_heads} or less"
            )

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks; `x` is overwritten. Raises `RankUnreachable`."""
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            raise RankUnreachable(str(error)) from error
        return x

    def joined(self, part: Tensor, columns: int) -> Tensor:
        """Return all `columns`, of which each rank passes its part: [rows, part] → [rows, columns], on rank 0.

        Other ranks get their own part back. Raises `RankUnreachable`.
        """
        if part.shape[0] == 0:
            return part.new_empty(0, columns if self.rank == 0 else part.shape[1])
        sizes = [self.part(columns, rank).size for rank in range(self.ranks)]
        padded = functional.pad(part, (0, max(sizes) - part.shape[1]))
        parts = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        try:
            dist.gather(padded, parts)
        except RuntimeError as error:
            raise RankUnreachable(str(error)) from error
        if parts is None:
            return part
        return torch.cat([each[:, :size] for each, size in zip(parts, sizes, strict=True)], 1)


WHOLE = Shard()


class SplitEmbedding:
    """Rows of the embedding of which each rank holds a part."""

    def __init__(self, rows: Tensor, first: int, shard: Shard) -> None:
        self._rows, self._first, self._shard = rows, first, shard

    def __getitem__(self, token_ids: Tensor) -> Tensor:
        places = token_ids - self._first
        is_elsewhere = (places < 0) | (places >= len(self._rows))
        found = self._rows[places.clamp_(0, len(self._rows) - 1)]
        return self._shard.summed(found.masked_fill_(is_elsewhere[:, None], 0))
