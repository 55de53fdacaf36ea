"""What the engine asks of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchwright.engine.attention import AttentionBackend, KVShape, LayerCache, choose_attention
from batchwright.engine.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step says of its R logit rows."""

    logits: Tensor
    """[rows that are not in `likeliest`, vocab]."""
    likeliest: Mapping[int, int | None] = field(default_factory=dict)
    """Of greedy rows, by their places among the logit rows; None where the logits are not finite."""


class ModelBody(ABC):
    """A causal language model over paged KV caches. `allocate` must be called once before `forward`."""

    name: str
    vocab_size: int
    max_model_len: int
    """Positions that the model was made for."""
    dtype: torch.dtype
    device: torch.device
    free_rows: int = 0
    """Rows that a step can have at about the cost of one, after `allocate`. 0: further rows cost, or round the others
    differently."""

    def __init__(self) -> None:
        self.caches: list[LayerCache] = []
        self.attention: AttentionBackend

    @property
    def description(self) -> str:
        """Which implementations run, for reports."""
        dtype = str(self.dtype).removeprefix("torch.")
        note = f" ({self.attention.note})" if self.attention.note else ""
        return f"{self.name} body, {self.attention.name} attention{note}, {dtype} on {self.device}"

    @abstractmethod
    def kv_shapes(self, num_blocks: int, block_size: int, attention: str) -> list[KVShape]:
        """The KV cache of each layer, with the attention implementation called `attention`."""

    @abstractmethod
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, vocab] of the rows in `batch.logit_rows`; keys and values of all rows go to the caches."""

    def output(self, batch: StepBatch, greedy: Sequence[bool]) -> StepOutput:
        """As `forward`; of the logit rows that are `greedy` nothing but the likeliest token is needed."""
        return StepOutput(self.forward(batch))

    def rows_for(self, tokens: int) -> int:
        """Rows that go through the matrix products for a step of `tokens`.

        On the CPU some products of a single row are computed twice: one row by itself takes kernels that round
        differently, and a sequence must compute alone what it computes in company.
        """
        return 2 if tokens == 1 and self.device.type == "cpu" else tokens

    def why_not_deterministic(self, rows: int, sequences: int) -> str | None:
        """Why the bits of what a sequence computes may depend on what else is in a step, and what to do about it.

        None: they do not, in steps of at most `rows` tokens of at most `sequences` sequences. `allocate` goes before.
        """
        return (
            f"the {self.name} body leaves products to torch, which may round a row differently in other company; "
            "use body='auto' with a model of the Llama family that has safetensors"
        )

    def allocate(self, num_blocks: int, block_size: int, attention: str) -> None:
        """Make the KV caches and choose the attention implementation. Raises as `choose_attention` does."""
        shapes = self.kv_shapes(num_blocks, block_size, attention)
        for shape in set(shapes):
            self.attention = choose_attention(attention, shape)
            if self.attention.name in ("sdpa", "reference"):  # which take every shape
                break
        self.caches = [self.attention.allocate(shape) for shape in shapes]
