"""`Encoder`: sentence embeddings without padding, as a model for a batcher or for a whole list of texts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from batchwright.encoder import layouts
from batchwright.encoder.bert import BertBody, unsuitable
from batchwright.encoder.layouts import LAYOUTS, Cells, Layout
from batchwright.encoder.sentence import pool, read_settings
from batchwright.encoder.texts import TextTokenizer
from batchwright.encoder.transformers_encoder import WrappedBody
from batchwright.engine.bodies.load import choose_device, choose_dtype, read_config
from batchwright.engine.bodies.weights import Weights
from batchwright.errors import InvalidRequest, UnsupportedModel
from batchwright.models import resolve
from batchwright.padding.rectangle import Ids

Vectors = npt.NDArray[np.float32]

_ROOM = {"cpu": 1024, "cuda": 16384}
"""Tokens of a row: few enough to keep its results in the cache of a CPU core, or enough to fill a GPU."""
_LEAST_ROOM = 256
"""Least tokens that are worth a lane of their own; all threads compute fewer together."""
_SLACK = 1.05
"""Ratio of rows to equal shares, so that the last texts find room in them."""
_PROBE_LENGTHS = (24, 11, 2)
"""Lengths of the sequences that a body is tried with."""
_WINDOW = 16384
"""Texts whose tokens are held at a time."""


@dataclass(frozen=True, slots=True)
class EncoderStats:
    """Counts of what an `Encoder` has computed so far."""

    texts: int = 0
    tokens: int = 0
    cells: int = 0
    """Computed tokens, padding included."""
    truncated: int = 0
    """Texts cut to the longest that the model takes; 0 without `truncate`."""


class Encoder:
    """Embedding of texts, with all-MiniLM-L6-v2 by default.

        Encoder().encode(["Why is the sky blue?", "Rayleigh scattering."])  # [2, 384] float32
        Batcher(Encoder())                                                  # the same, request by request

    `model` is a built-in name, a folder in transformers or sentence-transformers format, or a hub id. Pooling,
    normalization and the longest text are taken from its `modules.json` where it has one. Texts that a model wants
    prefixed ("query: ...") must be given with their prefix.

    - `dtype`: float32, whose vectors are comparable with those of other programs for the same model; bfloat16, about
      twice as fast and different in the third digit; float16; auto.
    - `device`: auto, cpu, cuda or cuda:N.
    - `layout`: "packed" puts texts end to end with separate attention; "padded" pads a batch to its longest text;
      "bucketed" to a few lengths that are fitted to the batch. They give the same vectors; packed computes least.
    - `max_length`: tokens of the longest text, special ones included (default: what the model was made for).
    - `truncate`: cut longer texts, and count them in `stats.truncated`, instead of refusing them.
    - `normalize`: vectors of length 1; None as the model says.

    May be used from several threads. Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError` for the model,
    ValueError for a setting.
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
        folder = resolve(str(model))
        settings = read_settings(folder)
        self._body = load_encoder_body(folder, layout, kind, where)
        self.max_length = _checked_length(max_length, settings.max_length, self._body.max_positions)
        self.tokenizer = TextTokenizer(
            folder, self._body.vocab_size, self.max_length, truncate=truncate, lower_case=settings.lower_case
        )
        self.model_name = str(model)
        self.layout = layout
        self.dim = self._body.dim * len(settings.pooling)
        self.description = f"{self._body.description}, {layout}, {str(kind).removeprefix('torch.')} on {where}"
        self._settings = settings
        self._normalize = settings.normalize if normalize is None else normalize
        self.device_type = where.type
        """cpu or cuda."""
        self._room = _ROOM[where.type]
        # transformers' own code has so many small steps that several threads would only slow each other down.
        self._num_lanes = torch.get_num_threads() if where.type == "cpu" and self._body.name == "fused" else 1
        self._lanes = _open_lanes(self._num_lanes)
        self._stats = EncoderStats()
        self._counting = threading.Lock()

    @property
    def stats(self) -> EncoderStats:
        """Counts since the encoder was made."""
        return replace(self._stats, truncated=self.tokenizer.truncated)

    def generate_batch(self, prompts: list[Any]) -> list[Vectors | InvalidRequest]:
        """Return the vector [dim] of each prompt, text or a list of token ids, computed as one batch in the layout.

        A prompt that cannot be computed gives an `InvalidRequest` in its place, one that is too long a
        `ContextLengthExceeded`.
        """
        encoded = self.tokenizer.encode_many(prompts)
        good = [at for at, ids in enumerate(encoded) if not isinstance(ids, InvalidRequest)]
        sequences = [ids for ids in encoded if not isinstance(ids, InvalidRequest)]
        outputs: list[Any] = list(encoded)
        for at, vector in zip(good, self._embed(sequences, self._one_batch(sequences)), strict=True):
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
            vectors[first : first + len(sequences)] = self._embed(sequences, self._many_batches(sequences))
        return self.shortened(vectors, dimensions)

    def require_dimensions(self, dimensions: int | None) -> None:
        """Raise `InvalidRequest` unless vectors can have so many dimensions; None: as many as the model's have.

        Only a model that was trained for it (Matryoshka), and whose `config.json` says so by `is_matryoshka` or
        `matryoshka_dimensions`, has vectors whose beginnings are vectors too.
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
        """Return the first `dimensions` of `vectors` [..., dim], of length 1 again where the vectors are normalized."""
        if dimensions is None or dimensions == self.dim:
            return vectors
        shorter = vectors[..., :dimensions]
        if not self._normalize:
            return np.ascontiguousarray(shorter)
        lengths = np.linalg.norm(shorter, axis=-1, keepdims=True)
        result: Vectors = shorter / np.maximum(lengths, np.float32(1e-12))
        return result

    def _one_batch(self, sequences: list[Ids]) -> list[Cells]:
        if not sequences:
            return []
        if self.layout == "packed":
            return layouts.packed(sequences, self._row_room(sequences))
        rectangles = layouts.padded if self.layout == "padded" else layouts.bucketed
        return rectangles(sequences, self.tokenizer.pad_token_id)

    def _many_batches(self, sequences: list[Ids]) -> list[Cells]:
        if self.layout == "packed":
            return self._one_batch(sequences)
        most = self._room if self._lanes is None else max(_LEAST_ROOM, self._row_room(sequences))
        return [
            replace(cells, indices=[members[index] for index in cells.indices])
            for members in layouts.batches(sequences, most)
            for cells in self._one_batch([sequences[index] for index in members])
        ]

    def _row_room(self, sequences: list[Ids]) -> int:
        """Return the most tokens of a row, so that all lanes get equal work."""
        if self._lanes is None:
            return self._room
        share = sum(map(len, sequences)) / self._num_lanes * _SLACK
        return max(_LEAST_ROOM, min(self._room, int(share) + 1))

    def _embed(self, sequences: list[Ids], batch: list[Cells]) -> Vectors:
        vectors = np.empty((len(sequences), self.dim), np.float32)

        def compute(cells: Cells) -> None:
            vectors[cells.indices] = self._vectors(cells)

        if self._lanes is None or len(batch) == 1:
            for cells in batch:
                compute(cells)
        else:
            list(self._lanes.map(compute, batch))
        with self._counting:
            stats = self._stats
            self._stats = replace(
                stats,
                texts=stats.texts + len(sequences),
                tokens=stats.tokens + sum(map(len, sequences)),
                cells=stats.cells + sum(len(cells.ids) for cells in batch),
            )
        return vectors

    @torch.inference_mode()
    def _vectors(self, cells: Cells) -> Vectors:
        starts, lengths = (torch.from_numpy(part.astype(np.int64)) for part in (cells.starts, cells.lengths))
        vectors = pool(self._body.forward(cells), starts, lengths, self._settings.pooling)
        result: Vectors = (functional.normalize(vectors, dim=1) if self._normalize else vectors).cpu().numpy()
        return result


def _checked_length(given: int | None, made_for: int | None, positions: int) -> int:
    if given is None:
        return min(made_for or positions, positions)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"max_length={given!r}: must be a whole number, 1 or more")
    if given > positions:
        raise ValueError(f"max_length={given}: this model has {positions} positions")
    return given


def _open_lanes(count: int) -> ThreadPoolExecutor | None:
    """Return `count` threads, each of which computes a batch alone; None if OpenMP cannot be told to.

    Threads that share one batch wait for each other after every product; threads with a batch of their own never do,
    and each finds the rows that it has just written in the cache of its own core.
    """
    if count == 1 or _set_openmp_threads() is None:
        return None
    return ThreadPoolExecutor(count, thread_name_prefix="batchwright-lane", initializer=_work_alone)


def _work_alone() -> None:
    torch.get_num_threads()  # torch sets the number of a new thread when first asked, which would undo ours
    set_threads = _set_openmp_threads()
    if set_threads is not None:
        set_threads(1)  # for this thread only: OpenMP keeps the number by thread


def _set_openmp_threads() -> Callable[[int], object] | None:
    """Return `omp_set_num_threads` of torch's OpenMP; torch's own function would change all threads to come."""
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # not found; no such library; Windows
        return None
    return found


EncoderBody: TypeAlias = BertBody | WrappedBody
"""Model that computes the last hidden states of tokens. Safe for use from several threads."""


@torch.inference_mode()
def load_encoder_body(folder: Path, layout: str, dtype: torch.dtype, device: torch.device) -> EncoderBody:
    """Load the model in `folder` for the fused body if that can run it, else for transformers' own code.

    The fused body, and packing by transformers' code, are compared with the plain way of computing a few sequences
    before they are used. Raises `UnsupportedModel`.
    """
    config = read_config(folder)
    wrapped = WrappedBody(folder, config, dtype, device)
    # Some models give a padding token no position.
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
    spans = [(int(rectangle.starts[index]), int(rectangle.lengths[index])) for index in probe.indices]
    expected = torch.cat([own[start : start + length] for start, length in spans]).float()
    error = float((body.forward(probe).float() - expected).norm() / expected.norm())
    if not error < (1e-4 if dtype is torch.float32 else 0.1):
        raise UnsupportedModel(
            f"hidden states of the fused body differ from transformers' own by {error:.2g} (relative norm): running "
            "it would give wrong embeddings"
        )
    return body
