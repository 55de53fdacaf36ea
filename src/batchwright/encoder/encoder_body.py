"""What an `Encoder` asks of a model's body, and which body runs a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from batchwright.encoder import layouts
from batchwright.encoder.bert import BertBody, unsuitable
from batchwright.encoder.layouts import Cells
from batchwright.encoder.transformers_encoder import WrappedBody
from batchwright.engine.bodies.load import read_config
from batchwright.engine.bodies.weights import Weights
from batchwright.errors import UnsupportedModel

_PROBE_LENGTHS = (24, 11, 2)


class EncoderBody(Protocol):
    """From tokens to their last hidden states. Safe for use from several threads."""

    name: str
    dim: int
    vocab_size: int
    max_positions: int
    """Tokens of the longest sequence that it can compute."""

    @property
    def description(self) -> str:
        """Which implementations run."""
        ...

    def forward(self, cells: Cells) -> Tensor:
        """[cells, dim]; of no meaning at padding. To be called in `torch.inference_mode`."""
        ...


@torch.inference_mode()
def load_encoder_body(folder: Path, layout: str, dtype: torch.dtype, device: torch.device) -> EncoderBody:
    """The model in `folder`: the fused body where it can run it, else transformers' own code.

    The fused body, and packing by transformers' code, are held against the plain way of computing a few sequences
    before they are used. Raises `UnsupportedModel`.
    """
    config = read_config(folder)
    wrapped = WrappedBody(folder, config, dtype, device)
    # A padding token would be given no position by some models.
    ordinary = np.delete(np.arange(min(wrapped.vocab_size, 1000)), [getattr(config, "pad_token_id", None) or 0])
    sequences = [ordinary[np.arange(length) * 37 % len(ordinary)] for length in _PROBE_LENGTHS]
    (probe,) = layouts.packed(sequences, sum(_PROBE_LENGTHS))
    weights = Weights(folder, dtype, device)
    if unsuitable(config, weights) is not None:
        if layout == "packed":
            wrapped.require_packing(probe)
        return wrapped
    body = BertBody(config, weights, dtype, device)
    (rectangle,) = layouts.padded(sequences, 0)
    own = wrapped.forward(rectangle)
    valid = np.concatenate([_cells(rectangle, index) for index in probe.indices])
    _require_equal(body.forward(probe), own[torch.from_numpy(valid)], dtype)
    return body


def _cells(rectangle: Cells, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(rectangle.lengths[index], dtype=np.int64) + int(rectangle.starts[index])


def _require_equal(ours: Tensor, own: Tensor, dtype: torch.dtype) -> None:
    error = float((ours.float() - own.float()).norm() / own.float().norm())
    if not error < (1e-4 if dtype is torch.float32 else 0.1):
        raise UnsupportedModel(
            f"hidden states of the fused body differ from transformers' own by {error:.2g} (relative norm): running "
            "it would give wrong embeddings"
        )
