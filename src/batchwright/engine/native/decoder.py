"""Binding of the compiled layers of `decoder.cpp` to torch tensors.

A structure takes its values from the attributes of the same names of a `PackedLinear` or a dataclass of this module.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchwright.engine.native.kernels import ProductKind, draw_arrays, places_of_draws
from batchwright.engine.native.weight_panels import PANEL, PackedLinear
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.step.multi_step import DecodedStep, DecodeRun, Interruption

_ALIGNED = 64
"""Bytes of a cache line."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Packed products of a layer, its norms [dim] in bfloat16, and its KV cache. `gate_up` is `interleaved`."""

    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    keys: Tensor
    values: Tensor
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderScreen:
    """Copy of the head in 8 bits: see `screening.h`. Tensors over outputs are padded to whole panels."""

    rough: PackedLinear
    lengths: Tensor
    """[outputs, padded] float32, as are `errors`."""
    errors: Tensor
    columns: Tensor
    """The head itself: [outputs, inputs] bfloat16, contiguous."""
    mixed: int
    """Vectors of 16 that are rotated together."""


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """All layers, and their common parts."""

    layers: Sequence[DecoderLayer]
    head: PackedLinear
    screen: DecoderScreen | None
    """Screen of the head; None if the likeliest token is found from all logits."""
    norm: Tensor
    cosines: Tensor
    sines: Tensor
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    mix: int
    """Channels of the input of `down` that are mixed with each other before they are quantized; 1 is none."""
    products: ProductKind

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(slots=True)
class DecoderSeconds:
    """Seconds of steps in products and in attention, each as a mean over the threads that took part in a step."""

    products: float = 0.0
    attention: float = 0.0


class _Linear(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("panels", "bias", "scales", "sums")),
        *((name, c_int64) for name in ("inputs", "outputs", "panel_bytes", "bits")),
    ]


class _Layer(Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm", "keys", "values")),
        ("window", c_int64),
    ]


class _Screen(Structure):
    _fields_ = [
        ("rough", _Linear),
        *((name, c_void_p) for name in ("lengths", "errors", "columns")),
        ("mixed", c_int64),
    ]


class _Model(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("head", _Linear),
        ("screen", POINTER(_Screen)),
        *((name, c_void_p) for name in ("norm", "cosines", "sines")),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "mix")),
        ("eps", c_float),
        ("attention_scale", c_float),
    ]


class _Step(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("residual", "positions", "slots", "tables", "starts", "contexts")),
        *((name, c_void_p) for name in ("logit_rows", "greedy", "mask_of", "masks", "greatest", "likeliest")),
        *((name, c_void_p) for name in ("logits", "scratch", "seconds")),
        *((name, c_int64) for name in ("rows", "sequences", "table_stride", "num_logit_rows", "logits_stride")),
        ("mask_words", c_int64),
    ]


class _Run(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("embedding", "first", "ends", "end_starts", "places")),
        *((name, c_void_p) for name in ("temperatures", "min_p", "top_k", "top_p", "uniforms")),
        *((name, c_void_p) for name in ("interrupted", "tokens", "seconds")),
        ("limit", c_double),
        *((name, c_int64) for name in ("most", "drawn", "vocab")),
    ]


_NUM_TIMES = 4
"""Number of times that the kernels record for a step of a run, as in `DecodedStep`."""


class NativeDecoder:
    """`model` in the form that the compiled kernels read; this keeps its tensors alive."""

    def __init__(self, library: ctypes.CDLL, model: DecoderModel) -> None:
        suffix = model.products
        self._decode = getattr(library, f"bw_decode_{suffix}")
        self._decode.argtypes = [POINTER(_Model), POINTER(_Step)]
        self._decode.restype = None
        self._multi_step = getattr(library, f"bw_multi_step_{suffix}")
        self._multi_step.argtypes = [POINTER(_Model), POINTER(_Step), POINTER(_Run)]
        self._multi_step.restype = c_int64
        self._scratch_bytes = getattr(library, f"bw_scratch_bytes_{suffix}")
        self._scratch_bytes.argtypes = [POINTER(_Model), c_int64]
        self._scratch_bytes.restype = c_int64
        self._kept = model
        self._model = _filled(_Model, model)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def forward(
        self,
        residual: Tensor,
        batch: StepBatch,
        seconds: DecoderSeconds | None = None,
        greedy: Sequence[bool] | None = None,
    ) -> tuple[Tensor, dict[int, int | None]]:
        """Return logits [rows, vocab], rows strided, for embeddings `residual` [T, hidden] bfloat16 (overwritten).

        For logit rows that are `greedy`, which need a screen, only the likeliest of the tokens that the batch's masks
        allow is returned, by the index of the row: None if its logits are not finite. The time that this takes is added
        to `seconds`.
        """
        chosen = None if greedy is None else _Chosen(greedy)
        spent = (c_double * 3)()
        logits, step = self._step(residual, batch, chosen)
        step.seconds = None if seconds is None else ctypes.addressof(spent)
        self._decode(byref(self._model), byref(step))
        if seconds is not None:
            seconds.products += spent[0]
            seconds.attention += spent[1]
        return logits[:, : self._kept.head.outputs], {} if chosen is None else chosen.tokens()

    def multi_step(
        self, embedding: Tensor, batch: StepBatch, run: DecodeRun, interruption: Interruption, *, screened: bool
    ) -> list[DecodedStep]:
        """Compute the step of `batch`, one row per sequence, and those after it, as defined by `run`.

        `embedding` [vocab, hidden] bfloat16 is contiguous. With `screened`, which needs a screen, greedy tokens are
        found without logits.
        """
        greedy = run.greedy
        chosen = _Chosen(greedy) if screened and any(greedy) else None
        residual = embedding.new_empty(batch.num_sequences, embedding.shape[1])
        _logits, step = self._step(residual, batch, chosen)
        ends, end_starts = run.flat_ends()
        tokens = np.empty((run.most, batch.num_sequences), np.int64)
        seconds = np.zeros((run.most, _NUM_TIMES))
        arrays: dict[str, npt.NDArray[Any]] = {
            "ends": ends,
            "end_starts": end_starts,
            "places": places_of_draws(greedy if chosen is None else [False] * run.uniforms.shape[1]),
            **draw_arrays(run.drawn),
            "uniforms": run.uniforms,
            "tokens": tokens,
            "seconds": seconds,
        }
        steps = _Run(
            embedding=embedding.data_ptr(),
            first=batch.token_ids.data_ptr(),
            **{name: each.ctypes.data for name, each in arrays.items()},
            interrupted=interruption.address,
            limit=run.seconds,
            most=run.most,
            drawn=run.uniforms.shape[1],
            vocab=self._kept.head.outputs,
        )
        done = self._multi_step(byref(self._model), byref(step), byref(steps))
        likeliest = 0 if chosen is None else chosen.count
        return [
            DecodedStep([None if token < 0 else token for token in of_step], likeliest, *times)
            for of_step, times in zip(tokens[:done].tolist(), seconds[:done].tolist(), strict=True)
        ]

    def _step(self, residual: Tensor, batch: StepBatch, chosen: _Chosen | None) -> tuple[Tensor, _Step]:
        """Return memory for the logits of a step [rows, padded vocab], and the step."""
        rows, wanted, masks = residual.shape[0], batch.logit_rows.shape[0], batch.masks
        plain = wanted if chosen is None else wanted - chosen.count
        logits = residual.new_empty(plain, -(-self._kept.head.outputs // PANEL) * PANEL)
        return logits, _Step(
            residual=residual.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            starts=batch.query_starts.data_ptr(),
            contexts=batch.context_lens.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            greedy=None if chosen is None else chosen.greedy.data_ptr(),
            mask_of=None if masks is None else masks.places.ctypes.data,
            masks=None if masks is None else masks.bits.ctypes.data,
            greatest=None if chosen is None else chosen.greatest.data_ptr(),
            likeliest=None if chosen is None else chosen.likeliest.data_ptr(),
            logits=logits.data_ptr(),
            scratch=self._room(rows),
            rows=rows,
            sequences=batch.num_sequences,
            table_stride=batch.block_tables.stride(0),
            num_logit_rows=wanted,
            logits_stride=logits.stride(0),
            mask_words=0 if masks is None else masks.bits.shape[1],
        )

    def _room(self, rows: int) -> int:
        needed = self._scratch_bytes(byref(self._model), max(rows, 1)) + _ALIGNED
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        start = self._scratch.data_ptr()
        return start + -start % _ALIGNED


class _Chosen:
    """Which logit rows are greedy, and memory for their results."""

    def __init__(self, greedy: Sequence[bool]) -> None:
        self.count = sum(greedy)
        self.greedy = torch.tensor(greedy, dtype=torch.bool)
        self.greatest, self.likeliest = torch.empty(len(greedy)), torch.empty(len(greedy), dtype=torch.int64)

    def tokens(self) -> dict[int, int | None]:
        places = self.greedy.nonzero()[:, 0]
        found = zip(places.tolist(), self.likeliest[places].tolist(), self.greatest[places].tolist(), strict=True)
        return {place: token if math.isfinite(greatest) else None for place, token, greatest in found}


def _filled(kind: type[Any], source: Any) -> Any:
    """Return `source` as a structure of type `kind`: tensors become addresses, None becomes null or 0."""
    return kind(**{name: _value(field, getattr(source, name)) for name, field in kind._fields_})


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if value is None:
        return 0 if field is c_int64 else None
    if issubclass(field, Structure):
        return _filled(field, value)
    if not hasattr(field, "contents"):
        return value
    values = value if isinstance(value, Sequence) else [value]
    return (field._type_ * len(values))(*(_filled(field._type_, each) for each in values))
