"""The interface of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from batchwright.cgroups import free_memory
from batchwright.engine.attention import AttentionBackend, KVShape, LayerCache, choose_attention
from batchwright.engine.native.large_pages import populate_beside
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.step.multi_step import DecodedStep, DecodeRun, Interruption
from batchwright.planning.bound import ModelCosts

_SOON_USED = 2**27
"""Bytes of the KV cache that are prepared while weights are packed: enough for about a hundred short sequences."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step for its R logit rows."""

    logits: Tensor
    """Logits of the rows that are not in `likeliest`: [rows, vocab]."""
    likeliest: Mapping[int, int | None] = field(default_factory=dict)
    """Likeliest tokens of greedy rows, by their indexes among the logit rows; None if the logits are not finite."""


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free on `device`."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


LEAST_POSITIONS = 1024
"""Every body can compute this many positions (or the model's maximum, if that is less) whatever `max_model_len` is:
steps that measure the machine need them."""


class KernelSeconds(Protocol):
    """Running totals of the seconds of steps, by what they were spent on."""

    products: float
    attention: float


class ModelBody(ABC):
    """A causal language model over paged KV caches. `allocate` must be called once before `forward`."""

    name: str
    vocab_size: int
    max_model_len: int
    """Greatest number of positions that the model was made for."""
    dtype: torch.dtype
    device: torch.device
    free_rows: int = 0
    """Rows that a step can have at about the cost of one, known after `allocate`. 0 if further rows cost time, or make
    the others round differently."""

    def __init__(self) -> None:
        self.caches: list[LayerCache] = []
        self.attention: AttentionBackend

    @property
    def description(self) -> str:
        """Names of the implementations that run, for reports."""
        dtype = str(self.dtype).removeprefix("torch.")
        note = f" ({self.attention.note})" if self.attention.note else ""
        return f"{self.name} body, {self.attention.name} attention{note}, {dtype} on {self.device}"

    @abstractmethod
    def kv_shapes(self, num_blocks: int, block_size: int, attention: str) -> list[KVShape]:
        """Return the KV cache shape of each layer, for the attention implementation called `attention`."""

    def prepare(self, max_num_seqs: int) -> None:
        """Do once, after `allocate`, what the first steps of up to this many sequences would otherwise do."""

    @abstractmethod
    def forward(self, batch: StepBatch) -> Tensor:
        """Return the logits of `batch.logit_rows` -> [R, vocab]; keys and values of all rows go to the caches."""

    def output(self, batch: StepBatch, greedy: Sequence[bool]) -> StepOutput:
        """Compute as `forward` does; for the logit rows that are `greedy`, only the likeliest tokens are needed.

        If they are found here, then among those that the batch's masks allow. Logits are never masked here.
        """
        return StepOutput(self.forward(batch))

    @property
    def has_multi_step(self) -> bool:
        """Whether it has `multi_step`, known after `allocate`."""
        return False

    def multi_step(self, batch: StepBatch, run: DecodeRun, interruption: Interruption) -> list[DecodedStep]:
        """Compute the step of `batch`, one row for each sequence, and those after it.

        `run` defines how tokens are chosen; it and `interruption` define when to stop.

        The blocks of the sequences must have room for all steps. Raises NotImplementedError unless `has_multi_step`.
        """
        raise NotImplementedError(f"the {self.name} body computes one step at a time")

    def rows_for(self, tokens: int) -> int:
        """Return how many rows go through the matrix products in a step of `tokens` tokens.

        On the CPU some products of a single row are computed twice: a single row takes kernels that round differently,
        and the results of a sequence must not depend on whether others are in the step.
        """
        return 2 if tokens == 1 and self.device.type == "cpu" else tokens

    @property
    def returns_early(self) -> bool:
        """Whether `output` returns while the device is still computing."""
        return self.device.type == "cuda"

    @property
    def costs(self) -> ModelCosts | None:
        """The costs of the model, known after `allocate`; None if its times cannot be separated."""
        return None

    def watch(self) -> KernelSeconds | None:
        """Return the object that adds up the seconds of its steps from now on; None as for `costs`."""
        return None

    @property
    def failure(self) -> str | None:
        """Why it can compute nothing any more, so that `forward` raises `EngineClosed`; None as long as it can."""
        return None

    def free_memory(self) -> int:
        """Return the free bytes on its device, or on each of its devices."""
        return free_bytes(self.device)

    def close(self) -> None:
        """Free what is not memory of this process."""

    def why_not_deterministic(self, rows: int, logit_rows: int) -> str | None:
        """Return why the bits of a sequence's results may depend on the rest of a step, and what to do about it.

        None if they do not depend on it in steps of at most `rows` tokens, of which `logit_rows` have logits. Call
        `allocate` first.
        """
        return (
            f"the {self.name} body leaves products to torch, which may round a row differently in other company; "
            "use body='auto' with a model of the Llama family that has safetensors"
        )

    def allocate(self, num_blocks: int, block_size: int, attention: str) -> None:
        """Make the KV caches and choose the attention implementation. Raises what `choose_attention` raises."""
        shapes = self.kv_shapes(num_blocks, block_size, attention)
        for shape in set(shapes):
            self.attention = choose_attention(attention, shape)
            if self.attention.name in ("sdpa", "reference"):  # they take every shape
                break
        self.caches = [self.attention.allocate(shape) for shape in shapes]
        if self.device.type == "cpu":
            populate_beside([each for cache in self.caches for each in (cache.keys, cache.values)], _SOON_USED)
