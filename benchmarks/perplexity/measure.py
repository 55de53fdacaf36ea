"""How well a model in some precision predicts documents, through the engine's own forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from batchwright.engine.bodies import load_body
from batchwright.engine.step.batch import StepBatch, build_batch
from batchwright.engine_config import DtypeName, EngineConfig, QuantizationName
from batchwright.scheduling import Chunk, Sequence
from batchwright.scheduling.sizes import BLOCK_SIZE

PRECISIONS: dict[str, tuple[DtypeName, QuantizationName | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int8-group": ("bfloat16", "int8-group"),
    "int4": ("bfloat16", "int4"),
}
"""Dtype and quantization by name."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of each predicted token, over all documents."""

    losses: Tensor
    """[tokens] float64: negative natural log of its probability."""
    likeliest: Tensor
    """[tokens]: the token that the model would have chosen."""
    implementation: str

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def above(self, other: Scores) -> tuple[float, float]:
        """How much greater this perplexity is, as a share of the other's, and two standard errors of that.

        The error is over the same tokens under both, so the difficulty of the text is not part of it.
        """
        difference = self.losses - other.losses
        error = 2 * float(difference.std()) / math.sqrt(difference.numel())
        return math.expm1(float(difference.mean())), error

    def agreement(self, other: Scores) -> float:
        """The share of places at which both would choose the same token."""
        return float((self.likeliest == other.likeliest).double().mean())


@torch.inference_mode()
def score(folder: Path, documents: list[list[int]], precision: str) -> Scores:
    """Every token of each document but its first, predicted from those before it. Raises as `load_body`."""
    dtype, quantization = PRECISIONS[precision]
    body = load_body(folder, EngineConfig(body="auto", dtype=dtype, device="auto", quantization=quantization))
    body.allocate(-(-max(map(len, documents)) // BLOCK_SIZE), BLOCK_SIZE, "auto")
    losses, likeliest = [], []
    for document in documents:
        logits = body.forward(_all_rows(document, body.device))[:-1].float()
        targets = torch.tensor(document[1:], device=body.device)
        losses.append(functional.cross_entropy(logits, targets, reduction="none").double().cpu())
        likeliest.append(logits.argmax(-1).cpu())
    return Scores(torch.cat(losses), torch.cat(likeliest), body.description)


def _all_rows(document: list[int], device: torch.device) -> StepBatch:
    """A step that computes the whole document, and the logits of every token."""
    sequence = Sequence(document, len(document), len(document))
    sequence.table.blocks.extend(range(-(-len(document) // BLOCK_SIZE)))
    batch = build_batch([Chunk(sequence, 0, len(document), True, True)], BLOCK_SIZE, device)
    return replace(batch, logit_rows=torch.arange(len(document), device=device))
