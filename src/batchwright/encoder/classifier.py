"""`Classifier`: labels and scores of texts and pairs of texts, by encoders with a head for sequence classification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchwright.encoder.classifier_body import ClassifierBody, load_classifier_body
from batchwright.encoder.encoder import checked_length
from batchwright.encoder.labels import read_labels
from batchwright.encoder.lanes import EncoderStats, Lanes, Vectors
from batchwright.encoder.layouts import LAYOUTS, Cells, Layout
from batchwright.encoder.pairs import Pair, PairTokenizer, TypedTokens
from batchwright.engine.bodies.load import choose_device, choose_dtype, read_config
from batchwright.errors import InvalidRequest, UnsupportedModel
from batchwright.models import resolve, served_name

_WINDOW = 4096
"""Inputs whose tokens are held at a time."""
_NO_LENGTH = 10**6
"""Length in tokenizers' settings from which on it means that none is known."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document ranked by a `Classifier`."""

    index: int
    """Position among the given documents."""
    score: float


class Classifier:
    """Classification of texts, and scores of pairs of texts, by the head with which the model was trained.

        Classifier("./sentiment").classify(["A fine day.", "Rain."])        # [2, labels] probabilities
        Classifier("./reranker").score([("a river?", "The Rhine.")])        # [1] float32, of a cross-encoder
        Classifier("./reranker").rank("a river?", ["Bread.", "The Rhine."])  # best first

    `model` is a folder in transformers format with an architecture for sequence classification, or a hub id. BERT,
    RoBERTa, XLM-RoBERTa and CamemBERT are computed without padding; others by transformers' own code.

    - `dtype`, `device`, `max_length`, `truncate`: as for an `Encoder`; if a pair is too long, its longer text is cut.
    - `layout`: as for an `Encoder`. None: "packed" if the model supports it, else "bucketed".

    Thread-safe. Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError` for the model, ValueError for a setting.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "float32",
        device: str = "auto",
        layout: Layout | None = None,
        max_length: int | None = None,
        truncate: bool = False,
    ) -> None:
        if layout is not None and layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
        where = choose_device(device)
        kind = choose_dtype(dtype, where)
        folder = resolve(str(model), weights="values")
        config = read_config(folder)
        self._body: ClassifierBody = load_classifier_body(folder, config, kind, where)
        if layout == "packed" and not self._body.packs:
            raise UnsupportedModel(
                f"{self._body.name} cannot compute sequences packed in one row: use layout='bucketed'"
            )
        try:
            self.settings = read_labels(config)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{folder}: {error}") from None
        self.labels = self.settings.labels
        """Names of the labels, in the order of logits and probabilities."""
        self.layout: Layout = layout or ("packed" if self._body.packs else "bucketed")
        self.max_length = checked_length(max_length, _made_for(folder), self._body.max_positions)
        self.tokenizer = PairTokenizer(folder, config.vocab_size, self.max_length, truncate=truncate, lower_case=False)
        self.model_name = served_name(str(model))
        self.device_type = where.type
        """cpu or cuda."""
        dtype_name = str(kind).removeprefix("torch.")
        self.description = f"{self._body.description}, {self.layout}, {dtype_name} on {where}"
        self._types = getattr(config, "type_vocab_size", None) not in (None, 0, 1)
        self._lanes = Lanes(
            self._logits,
            len(self.labels),
            self.layout,
            self.tokenizer.pad_token_id,
            where.type,
            alone=not self._body.packs,
        )

    @property
    def scores_pairs(self) -> bool:
        """Whether it is a cross-encoder, with one label: the score of a text or pair."""
        return len(self.labels) == 1

    @property
    def stats(self) -> EncoderStats:
        """Counts since the classifier was created."""
        return replace(self._lanes.stats, truncated=self.tokenizer.truncated)

    def classify(self, inputs: Sequence[str | Pair]) -> Vectors:
        """Return the probability of each label for each text or pair -> [len(inputs), len(labels)] float32.

        They add up to 1, unless the model's labels are not mutually exclusive (`problem_type`), or it has one label;
        for a regression they are its values. Raises the errors of `logits`.
        """
        return self.settings.probabilities(self.logits(inputs))

    def score(self, pairs: Sequence[Pair]) -> Vectors:
        """Return the score of each pair -> [len(pairs)] float32, from 0 to 1 unless the model's config says otherwise.

        Raises ValueError for a model with several labels, and the errors of `logits`.
        """
        self.require_scores()
        return self.settings.scores(self.logits(pairs))

    def rank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[Ranked]:
        """Return the documents by descending score for `query`, equal ones in their order; the first `top_n`.

        Equal documents have equal scores. Raises the errors of `score`.
        """
        scores = self.score([(query, document) for document in documents])
        # The last digits of a score depend on the position in a row.
        first: dict[str, int] = {}
        scores = scores[[first.setdefault(document, at) for at, document in enumerate(documents)]]
        return [Ranked(index, float(scores[index])) for index in best_first(scores)[:top_n]]

    def logits(self, inputs: Sequence[str | Pair]) -> Vectors:
        """Return the logits of texts and pairs, batched for speed -> [len(inputs), len(labels)] float32.

        Raises `InvalidRequest`, naming the position, for an input that cannot be computed (`ContextLengthExceeded` for
        one that is too long), and ValueError for a single text in place of a list.
        """
        if isinstance(inputs, str):
            raise ValueError("inputs is a single text: give a list")
        found = np.empty((len(inputs), len(self.labels)), np.float32)
        for first in range(0, len(inputs), _WINDOW):
            tokens: list[TypedTokens] = []
            for at, each in enumerate(self.tokenizer.encode_inputs(inputs[first : first + _WINDOW]), first):
                if isinstance(each, InvalidRequest):
                    raise type(each)(f"inputs[{at}]: {each}", param=f"inputs[{at}]") from each
                tokens.append(each)
            found[first : first + len(tokens)] = self._lanes.many_batches(*self._parts(tokens))
        return found

    def generate_batch(self, prompts: list[Any]) -> list[Vectors | InvalidRequest]:
        """Return the logits [labels] of each prompt, a text, a pair, or its tokens, computed as one batch.

        For a prompt that cannot be computed, the list has an `InvalidRequest`.
        """
        encoded = self.tokenizer.encode_inputs(prompts)
        good = [at for at, tokens in enumerate(encoded) if not isinstance(tokens, InvalidRequest)]
        outputs: list[Any] = list(encoded)
        parts = self._parts([tokens for tokens in encoded if not isinstance(tokens, InvalidRequest)])
        for at, logits in zip(good, self._lanes.one_batch(*parts), strict=True):
            outputs[at] = logits
        return outputs

    def require_scores(self) -> None:
        """Raise ValueError for a model with several labels."""
        if not self.scores_pairs:
            raise ValueError(
                f"{self.model_name} has {len(self.labels)} labels: a cross-encoder, which scores pairs, has one; use "
                "classify"
            )

    def _parts(self, tokens: list[TypedTokens]) -> tuple[list[Any], list[Any] | None]:
        """Return the ids and the types of sequences; None for the types if all are the first."""
        has_types = self._types and any(each.types.any() for each in tokens)
        return [each.ids for each in tokens], [each.types for each in tokens] if has_types else None

    @torch.inference_mode()
    def _logits(self, cells: Cells) -> Vectors:
        result: Vectors = self._body.logits(cells).float().cpu().numpy()
        return result


def best_first(scores: Vectors) -> list[int]:
    """Return the positions of `scores` from the highest on, equal ones in their order."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order


def _made_for(folder: Path) -> int | None:
    try:
        length = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("model_max_length")
    except (OSError, ValueError):
        return None
    return int(length) if isinstance(length, (int, float)) and 0 < length < _NO_LENGTH else None
