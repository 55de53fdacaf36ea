"""`Encoder`: sentence embeddings without padding, as a model for a batcher or for a whole list of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from batchwright.encoder import layouts
from batchwright.encoder.bert import BertBody, unsuitable
from batchwright.encoder.lanes import EncoderStats, Lanes, Vectors
from batchwright.encoder.layouts import LAYOUTS, Cells, Layout
from batchwright.encoder.sentence import pool, read_settings
from batchwright.encoder.texts import TextTokenizer
from batchwright.encoder.transformers_encoder import WrappedBody
from batchwright.engine.bodies.load import choose_device, choose_dtype, read_config
from batchwright.engine.bodies.weights import Weights
from batchwright.errors import InvalidRequest, UnsupportedModel
from batchwright.models import resolve, served_name
from batchwright.padding.rectangle import Ids

_PROBE_LENGTHS = (24, 11, 2)
"""Lengths of the sequences with which a body is tried."""
_WINDOW = 16384
"""Texts whose tokens are held at a time."""


class Encoder:
    """Embedding of texts, with all-MiniLM-L6-v2 by default.

        Encoder().encode(["Why is the sky blue?", "Rayleigh scattering."])  # [2, 384] float32
        Batcher(Encoder())                                                  # the same, request by request

    `model` is a built-in name, a folder in transformers or sentence-transformers format, or a hub id. Pooling,
    normalization and the longest text are taken from its `modules.json` if it has one. If a model expects prefixes
    ("query: ..."), texts must be passed with them.

    - `dtype`: float32, with vectors comparable to those of other programs for the same model; bfloat16, about twice as
      fast and different in the third digit; float16; auto.
    - `device`: auto, cpu, cuda or cuda:N.
    - `layout`: "packed" puts texts end to end with separate attention; "padded" pads a batch to its longest text;
      "bucketed" to a few lengths that are fitted to the batch. All give the same vectors; packed computes least.
    - `max_length`: tokens of the longest text, including special ones (default: what the model was made for).
    - `truncate`: cut longer texts, and count them in `stats.truncated`, instead of refusing them.
    - `normalize`: whether vectors have length 1; None: as the model specifies.

    Thread-safe. Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError` for the model, ValueError for a setting.
    """

    def __init__(
        self,
        model: str | Path = "minilm",
        *,
        dtype: str = "float32",
        device: str = "auto",
        layout: Layout = "packed",
        max_length: int | None = None,
        truncate: bool = False,
        normalize: bool | None = None,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
        where = choose_device(device)
        kind = choose_dtype(dtype, where)
        folder = resolve(str(model), weights="values")
        settings = read_settings(folder)
        self._body = load_encoder_body(folder, layout, kind, where)
        self.max_length = checked_length(max_length, settings.max_length, self._body.max_positions)
        self.tokenizer = TextTokenizer(
            folder, self._body.vocab_size, self.max_length, truncate=truncate, lower_case=settings.lower_case
        )
        self.model_name = served_name(str(model))
        self.layout = layout
        self.dim = self._body.dim * len(settings.pooling)
        self.description = f"{self._body.description}, {layout}, {str(kind).removeprefix('torch.')} on {where}"
        self._settings = settings
        self._normalize = settings.normalize if normalize is None else normalize
        self.device_type = where.type
        """cpu or cuda."""
        # transformers' own code has many small steps, in which several threads would only slow each other down.
        self._lanes = Lanes(
            self._vectors,
            self.dim,
            layout,
            self.tokenizer.pad_token_id,
            where.type,
            alone=self._body.name != "fused",
        )

    @property
    def stats(self) -> EncoderStats:
        """Counts since the encoder was created."""
        return replace(self._lanes.stats, truncated=self.tokenizer.truncated)

    def generate_batch(self, prompts: list[Any]) -> list[Vectors | InvalidRequest]:
        """Return the vector [dim] of each prompt, text or a list of token ids, computed as one batch in the layout.

        For a prompt that cannot be computed, the list has an `InvalidRequest`; for one that is too long, a
        `ContextLengthExceeded`.
        """
        encoded = self.tokenizer.encode_many(prompts)
        good = [at for at, ids in enumerate(encoded) if not isinstance(ids, InvalidRequest)]
        sequences = [ids for ids in encoded if not isinstance(ids, InvalidRequest)]
        outputs: list[Any] = list(encoded)
        for at, vector in zip(good, self._lanes.one_batch(sequences), strict=True):
            outputs[at] = vector
        return outputs

    def encode(self, texts: Sequence[str], *, dimensions: int | None = None) -> Vectors:
        """Return the vectors of `texts`, batched for speed -> [len(texts), dim] float32, shortened as by `shortened`.

        Raises `InvalidRequest`, naming the position, for a text that cannot be computed (`ContextLengthExceeded` for
        one that is too long), and ValueError for a single text in place of a list.
        """
        self.require_dimensions(dimensions)
        if isinstance(texts, str):
            raise ValueError("texts is a single text: give a list, encode([text])")
        vectors = np.empty((len(texts), self.dim), np.float32)
        for first in range(0, len(texts), _WINDOW):
            encoded = self.tokenizer.encode_many(texts[first : first + _WINDOW])
            sequences: list[Ids] = []
            for at, ids in enumerate(encoded, first):
                if isinstance(ids, InvalidRequest):
                    raise type(ids)(f"texts[{at}]: {ids}", param=f"texts[{at}]") from ids
                sequences.append(ids)
            vectors[first : first + len(sequences)] = self._lanes.many_batches(sequences)
        return self.shortened(vectors, dimensions)

    def require_dimensions(self, dimensions: int | None) -> None:
        """Raise `InvalidRequest` unless vectors can have this many dimensions; None: as many as the model's.

        Vectors can be shortened only if the model was trained for it (Matryoshka), and its `config.json` says so by
        `is_matryoshka` or `matryoshka_dimensions`.
        """
        if dimensions is None or dimensions == self.dim:
            return
        if not self._settings.shortens:
            raise InvalidRequest(
                f"dimensions={dimensions}: {self.model_name} has vectors of {self.dim}, which cannot be shortened: "
                "leave it out",
                param="dimensions",
                code="unsupported_parameter",
            )
        allowed = self._settings.shorter
        if not 0 < dimensions < self.dim or (allowed and dimensions not in allowed):
            which = f"one of {', '.join(map(str, allowed))}" if allowed else f"1 to {self.dim}"
            raise InvalidRequest(
                f"dimensions={dimensions}: {self.model_name} has vectors of {self.dim}, must be {which}",
                param="dimensions",
            )

    def shortened(self, vectors: Vectors, dimensions: int | None) -> Vectors:
        """Return the first `dimensions` of `vectors` [..., dim], normalized again if the vectors are normalized."""
        if dimensions is None or dimensions == self.dim:
            return vectors
        shorter = vectors[..., :dimensions]
        if not self._normalize:
            return np.ascontiguousarray(shorter)
        lengths = np.linalg.norm(shorter, axis=-1, keepdims=True)
        result: Vectors = shorter / np.maximum(lengths, np.float32(1e-12))
        return result

    @torch.inference_mode()
    def _vectors(self, cells: Cells) -> Vectors:
        starts, lengths = (torch.from_numpy(part.astype(np.int64)) for part in (cells.starts, cells.lengths))
        vectors = pool(self._body.forward(cells), starts, lengths, self._settings.pooling)
        result: Vectors = (functional.normalize(vectors, dim=1) if self._normalize else vectors).cpu().numpy()
        return result


def checked_length(given: int | None, made_for: int | None, positions: int) -> int:
    """Return the most tokens of a text: `given`, by default as many as the model was made for."""
    if given is None:
        return min(made_for or positions, positions)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"max_length={given!r}: must be a whole number, 1 or more")
    if given > positions:
        raise ValueError(f"max_length={given}: this model has {positions} positions")
    return given


def tokenizer_of(folder: Path) -> TextTokenizer:
    """Load only the tokenizer of the encoder in `folder`, and its limit of tokens. Raises the errors of `Encoder`."""
    config, settings = read_config(folder), read_settings(folder)
    is_wrapped = unsuitable(config, Weights(folder, torch.float32, torch.device("cpu"))) is not None
    positions = (WrappedBody if is_wrapped else BertBody).positions_of(config)
    most = checked_length(None, settings.max_length, positions)
    return TextTokenizer(folder, config.vocab_size, most, truncate=False, lower_case=settings.lower_case)


EncoderBody: TypeAlias = BertBody | WrappedBody
"""Model that computes the last hidden states of tokens. Safe for use from several threads."""


def probe_sequences(config: Any) -> tuple[list[Ids], Cells]:
    """Return sequences with which a body is tried, and the same sequences packed."""
    # Some models give padding tokens no position.
    ordinary = np.delete(np.arange(min(config.vocab_size, 1000)), [getattr(config, "pad_token_id", None) or 0])
    sequences = [ordinary[np.arange(length) * 37 % len(ordinary)] for length in _PROBE_LENGTHS]
    (probe,) = layouts.packed(sequences, sum(_PROBE_LENGTHS))
    return sequences, probe


@torch.inference_mode()
def load_encoder_body(folder: Path, layout: str, dtype: torch.dtype, device: torch.device) -> EncoderBody:
    """Load the model in `folder` for the fused body if that can run it, else for transformers' own code.

    The fused body, and packing by transformers' code, are compared with the plain way of computing a few sequences
    before they are used. Raises `UnsupportedModel`.
    """
    config = read_config(folder)
    wrapped = WrappedBody(folder, config, dtype, device)
    sequences, probe = probe_sequences(config)
    weights = Weights(folder, dtype, device)
    if unsuitable(config, weights) is not None:
        if layout == "packed":
            wrapped.require_packing(probe)
        return wrapped
    body = BertBody(config, weights, dtype, device)
    (rectangle,) = layouts.padded(sequences, 0)
    own = wrapped.forward(rectangle)
    spans = [(int(rectangle.starts[index]), int(rectangle.lengths[index])) for index in probe.indices]
    expected = torch.cat([own[start : start + length] for start, length in spans]).float()
    error = float((body.forward(probe).float() - expected).norm() / expected.norm())
    if not error < (1e-4 if dtype is torch.float32 else 0.1):
        raise UnsupportedModel(
            f"hidden states of the fused body differ from transformers' own by {error:.2g} (relative norm): running "
            "it would give wrong embeddings"
        )
    return body
