"""A step's tiles on the device, made once for all layers; or kept in one place for steps that are replayed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchwright.engine.attention.paged import PagedPlan
from batchwright.engine.attention.tiles import FIELDS, TileShape, Tiling, tile
from batchwright.engine.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class DeviceTiling:
    """A `Tiling`, or one for any step of no more tiles, merged rows and partial results.

    Tiles without queries, and merged rows of -1, stand for nothing.
    """

    narrow: Tensor
    wide: Tensor
    rows: Tensor
    partial_starts: Tensor
    merged: Tensor
    num_partials: int

    @classmethod
    def of(cls, tiling: Tiling, device: torch.device) -> DeviceTiling:
        parts = _parts(tiling)
        # One copy: five would take the host five times as long.
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device, non_blocking=True)
        return cls.within(flat, parts, tiling.num_partials)

    @classmethod
    def within(cls, flat: Tensor, parts: list[np.ndarray], num_partials: int) -> DeviceTiling:
        """That whose arrays lie in `flat`, one after the other, as large as `parts`."""
        narrow, wide, rows, partial_starts, merged = flat.split([part.size for part in parts])
        return cls(narrow.view(-1, FIELDS), wide.view(-1, FIELDS), rows, partial_starts, merged, num_partials)


class TilingRoom:
    """Memory for the tiles of one step after the other, as large as `room`."""

    def __init__(self, room: Tiling, device: torch.device) -> None:
        self._room, self._parts = room, _parts(room)
        self._empty = np.concatenate([part.ravel() for part in self._parts])
        self._flat = torch.from_numpy(self._empty.copy()).to(device)
        self.tiling = DeviceTiling.within(self._flat, self._parts, room.num_partials)

    def load(self, tiling: Tiling) -> bool:
        """Take in a step's tiles; False when there is no room for them."""
        parts = _parts(tiling)
        if tiling.num_partials > self._room.num_partials:
            return False
        if any(part.size > room.size for part, room in zip(parts, self._parts, strict=True)):
            return False
        flat, at = self._empty.copy(), 0
        for part, room in zip(parts, self._parts, strict=True):
            flat[at : at + part.size] = part.ravel()
            at += room.size
        self._flat.copy_(torch.from_numpy(flat), non_blocking=True)
        return True


class TiledPlan(PagedPlan):
    """The tiles of a step, made for each kind of layer once."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        super().__init__(batch, block_size)
        self._batch = batch
        self.tilings: dict[TileShape, DeviceTiling] = {}

    def tiling(self, shape: TileShape) -> DeviceTiling:
        if shape not in self.tilings:
            batch = self._batch
            cut = tile(batch.tables, np.array(batch.query_lens), np.array(batch.contexts), shape)
            self.tilings[shape] = DeviceTiling.of(cut, batch.slots.device)
        return self.tilings[shape]


def _parts(tiling: Tiling) -> list[np.ndarray]:
    return [tiling.narrow, tiling.wide, tiling.rows, tiling.partial_starts, tiling.merged]
