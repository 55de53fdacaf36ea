"""Messages between rank 0 and the process of another rank, sent over a `Connection`, which pickles them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from batchwright.engine_config import EngineConfig

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank loads: the first message to it."""

    folder: Path
    config: EngineConfig
    rank: int
    ranks: int
    cpus: tuple[int, ...]
    """Processors that it uses; empty: any."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """The size of the KV cache, and the file through which the ranks find each other."""

    num_blocks: int
    block_size: int
    attention: str
    meeting: Path


@dataclass(frozen=True, slots=True)
class Step:
    """A step, in the form that `batch_of` takes."""

    token_ids: np.ndarray
    counts: np.ndarray
    starts: np.ndarray
    tables: np.ndarray
    logit_rows: np.ndarray


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answer to `Load`: the rank's part of the model is in memory."""

    free_memory: int
    """Bytes that are free on its device."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Answer to `Allocate`: the rank has its part of the KV cache."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Message that the rank has found the others."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Message that the rank cannot go on."""

    reason: str
    is_own: bool
    """Whether the rank itself failed, rather than the connection to another one."""


ToRank: TypeAlias = Load | Allocate | Step
FromRank: TypeAlias = Loaded | Allocated | Joined | Failed
