"""The weights of a Llama-like model, and what runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.step.batch import StepBatch


@dataclass(frozen=True, slots=True)
class Projection:
    """`weight` [out, in] and `bias` [out] of a linear layer."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, as the checkpoint has it but for products side by side."""

    input_norm: Tensor
    qkv: Projection
    """q, k and v, one below the other."""
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    """Gate, and below it up."""
    down: Projection
    window: int | None


@dataclass(slots=True)
class LlamaWeights:
    """A model but for its embedding. Who packs a layer takes it out of `layers`, so that no weight is held twice."""

    layers: list[LayerWeights]
    norm: Tensor
    head: Projection
    rope: RopeTable
    shape: HeadShape
    hidden: int
    intermediate: int
    eps: float
    tied: bool = False
    """Whether `head` is the embedding, which is kept as it is."""
    mix: int = 1
    """Channels of the input of `down` that are mixed with each other before they are quantized (rotation.py)."""
    biased_mlp: bool = field(init=False)
    """Known after the layers have been taken out, too."""

    def __post_init__(self) -> None:
        self.biased_mlp = any(layer.gate_up.bias is not None for layer in self.layers)


class LayerStack(Protocol):
    """All layers and the head, with their KV caches."""

    products: str
    """What multiplies, for reports."""

    def logits(self, residual: Tensor, batch: StepBatch) -> Tensor:
        """Logits [R, vocab] of `batch.logit_rows` for the embeddings [T, hidden] of a step, which are overwritten."""
        ...

    def rows_for(self, tokens: int) -> int:
        """See `ModelBody.rows_for`."""
        ...
