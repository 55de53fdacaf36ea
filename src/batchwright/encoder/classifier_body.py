"""Bodies of sequence classifiers: the fused encoder with its head, or transformers' own code with padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from batchwright.encoder.bert import BertBody, unsuitable
from batchwright.encoder.encoder import probe_sequences
from batchwright.encoder.layouts import Cells, padded, typed
from batchwright.engine.bodies.weights import Weights
from batchwright.engine.pretrained import load_pretrained
from batchwright.errors import UnsupportedModel

_ARCHITECTURE = "ForSequenceClassification"
_HEADS = {"bert": ("bert.pooler.dense", "classifier")}
_ROBERTA_HEAD = ("classifier.dense", "classifier.out_proj")
"""Names of the two products of a head, the first with a tanh: BERT counts its first as part of the encoder."""
_LEAST_NORM = 0.1
"""Size of logits below which their difference is not taken relative to it."""


class FusedClassifier:
    """The fused body of the BERT family with a head over the hidden state of the first token."""

    name = "fused"
    packs = True

    def __init__(self, config: Any, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._body = BertBody(config, weights, dtype, device)
        self.max_positions = self._body.max_positions
        dense, out = _HEADS.get(config.model_type, _ROBERTA_HEAD)
        self._dense = weights.take(f"{dense}.weight"), weights.take(f"{dense}.bias")
        self._out = weights.take(f"{out}.weight"), weights.take(f"{out}.bias")

    @property
    def description(self) -> str:
        """Names of the implementations that run."""
        return self._body.description

    def logits(self, cells: Cells) -> Tensor:
        """Return the logits -> [sequences, labels]. Call in `torch.inference_mode`."""
        hidden = self._body.forward(cells)
        first = hidden[torch.from_numpy(cells.starts.astype(np.int64)).to(hidden.device)]
        return functional.linear(functional.linear(first, *self._dense).tanh(), *self._out)


class WrappedClassifier:
    """A classifier of transformers. Raises `UnsupportedModel` if transformers cannot load the folder as one."""

    name = "transformers"
    packs = False

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForSequenceClassification

        architecture = str((getattr(config, "architectures", None) or [config.model_type])[0])
        if not architecture.endswith(_ARCHITECTURE):
            raise UnsupportedModel(
                f"{folder} holds a {architecture}, which has no head for sequence classification: name a folder whose "
                f"config.json has an architecture that ends in {_ARCHITECTURE}"
            )
        self._architecture = architecture
        self._model, lacking = load_pretrained(
            AutoModelForSequenceClassification, folder, f"{architecture} as a classifier", dtype, device
        )
        if lacking:
            raise UnsupportedModel(f"{folder} has no weights for {lacking[0]} and {len(lacking) - 1} others")
        self._device = device
        offset = config.pad_token_id + 1 if _positions_follow_padding(config) else 0
        self.max_positions: int = (getattr(config, "max_position_embeddings", None) or 2**20) - offset

    @property
    def description(self) -> str:
        """Names of the implementations that run."""
        return "transformers body"

    def logits(self, cells: Cells) -> Tensor:
        """Return the logits of sequences that are padded to one width -> [sequences, labels]."""
        assert cells.width is not None
        width = cells.width
        mask = torch.arange(width) < torch.from_numpy(cells.lengths)[:, None]
        inputs = {"input_ids": torch.from_numpy(cells.ids).view(-1, width), "attention_mask": mask.long()}
        if cells.types is not None:
            inputs["token_type_ids"] = torch.from_numpy(cells.types).view(-1, width)
        found: Tensor = self._model(**{name: each.to(self._device) for name, each in inputs.items()}).logits
        return found

    def require_padding(self, sequences: list[Any], pad_token_id: int, dtype: torch.dtype) -> None:
        """Compute `sequences` padded and one by one. Raises `UnsupportedModel` if the results differ."""
        together = self.logits(*padded(sequences, pad_token_id)).float()
        alone = torch.cat([self.logits(*padded([each], pad_token_id)).float() for each in sequences])
        if not _distance(together, alone) < _tolerance(dtype):
            raise UnsupportedModel(
                f"{self._architecture} gives other logits beside padding: it cannot be computed in batches"
            )


ClassifierBody: TypeAlias = FusedClassifier | WrappedClassifier
"""Model that computes the logits of sequences. Safe for use from several threads."""


@torch.inference_mode()
def load_classifier_body(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> ClassifierBody:
    """Load the model in `folder` for the fused body if that can run it, else for transformers' own code.

    Both are compared with the plain way of computing a few sequences before they are used. Raises `UnsupportedModel`.
    """
    wrapped = WrappedClassifier(folder, config, dtype, device)
    sequences, probe = probe_sequences(config)
    weights = Weights(folder, dtype, device)
    head = _HEADS.get(config.model_type, _ROBERTA_HEAD)
    if unsuitable(config, weights) is not None or not all(weights.has(f"{name}.weight") for name in head):
        wrapped.require_padding(sequences, getattr(config, "pad_token_id", None) or 0, dtype)
        return wrapped
    body = FusedClassifier(config, weights, dtype, device)
    (rectangle,) = padded(sequences, 0)
    if config.type_vocab_size > 1:
        types = [(np.arange(len(each)) >= len(each) // 2).astype(np.int64) for each in sequences]
        rectangle, probe = typed(rectangle, types), typed(probe, types)
    expected = wrapped.logits(rectangle).float()[probe.indices]
    if not (distance := _distance(body.logits(probe).float(), expected)) < _tolerance(dtype):
        raise UnsupportedModel(
            f"logits of the fused body differ from transformers' own by {distance:.2g} (relative norm): running it "
            "would give wrong labels"
        )
    return body


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / max(float(expected.norm()), _LEAST_NORM))


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype is torch.float32 else 0.1


def _positions_follow_padding(config: Any) -> bool:
    """Whether positions begin after the padding token's, as in RoBERTa."""
    return "roberta" in config.model_type or config.model_type == "camembert"
