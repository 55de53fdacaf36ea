"""Labels of a sequence classifier, and what its logits mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt

from batchwright.errors import UnsupportedModel

Activation: TypeAlias = Literal["sigmoid", "softmax", "identity"]
Floats: TypeAlias = npt.NDArray[np.float32]

_OF_PROBLEM: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """Labels of a model, and the functions that turn its logits into probabilities and scores."""

    labels: tuple[str, ...]
    probability: Activation
    """For classification, as in transformers' pipeline."""
    score: Activation
    """For pairs, as in sentence-transformers' `CrossEncoder`."""

    def probabilities(self, logits: Floats) -> Floats:
        """Return the probability of each label, given logits [..., labels]; for a regression, its values."""
        return _activated(logits, self.probability)

    def scores(self, logits: Floats) -> Floats:
        """Return the scores [...] of pairs, given logits [..., 1]."""
        return _activated(logits, self.score)[..., 0]


def read_labels(config: Any) -> LabelSettings:
    """Read the labels from a transformers config. Raises `UnsupportedModel` for an unknown activation."""
    count = int(config.num_labels)
    names = getattr(config, "id2label", None) or {}
    usual: Activation = "sigmoid" if count == 1 else "softmax"
    problem = getattr(config, "problem_type", None)
    return LabelSettings(
        labels=tuple(str(names.get(index, f"LABEL_{index}")) for index in range(count)),
        probability=usual if problem is None else _OF_PROBLEM.get(problem, usual),
        score=_named_activation(config) or usual,
    )


def _named_activation(config: Any) -> Activation | None:
    """Return the activation that sentence-transformers wrote into a config, by its class; None if it wrote none."""
    written = getattr(config, "sentence_transformers", None)
    named = written.get("activation_fn") if isinstance(written, dict) else None
    named = named or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        return None
    kind = str(named).rpartition(".")[2].lower()
    for known in get_args(Activation):
        if kind == known:
            found: Activation = known
            return found
    raise UnsupportedModel(f"its scores go through {named}: only {', '.join(get_args(Activation))} are known")


def _activated(logits: Floats, activation: Activation) -> Floats:
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        # This form's exponential never overflows.
        small = np.exp(-np.abs(logits))
        result: Floats = np.where(logits >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
        return result
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return cast("Floats", (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32))
