"""The tensors of a safetensors checkpoint, read one by one, and the weights of a Llama-like model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchwright.engine.bodies.ops import HeadShape, RopeTable
from batchwright.engine.bodies.packed_checkpoints import PackedFormat, Take
from batchwright.engine.native.weight_groups import GroupedWeight
from batchwright.errors import UnsupportedModel

_Unpacked = TypeVar("_Unpacked")
Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Some consecutive rows, columns or heads: from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, number: int) -> Part:
        """Return the range in elements, given `number` elements for each item."""
        return Part(self.start * number, self.stop * number)


class Weights:
    """Tensors by name, cast and moved as they are read, so that a second copy of a model is never held.

    Where kernels rely on the shape that the config implies, it is required of the tensor. Raises `UnsupportedModel` if
    the folder has no safetensors, lacks a tensor, or has one of another shape.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, packed: PackedFormat | None = None
    ) -> None:
        """`packed`: how the weights of layers are packed in a quantized checkpoint."""
        self._folder, self._dtype, self._device, self._packed = folder, dtype, device, packed
        self._open: dict[Path, Any] = {}
        self._files = _tensor_files(folder)

    @property
    def packed(self) -> bool:
        """Whether the checkpoint was quantized."""
        return self._packed is not None

    def has(self, name: str) -> bool:
        return name in self._files or self._packed_name(name) is not None

    def _packed_name(self, name: str) -> str | None:
        """Return the prefix of the names of the tensors that the weight called `name` is packed in, if it is."""
        base, _, kind = name.rpartition(".")
        packed = self._packed
        return base + "." if packed and kind == "weight" and f"{base}.{packed.suffix}" in self._files else None

    def numbers(self, name: str, shape: Shape) -> GroupedWeight | None:
        """Return the weight called `name` as the numbers that the checkpoint has for it; None if it has values.

        Raises `UnsupportedModel` if they are damaged.
        """
        if self._packed is None or (base := self._packed_name(name)) is None:
            return None
        found = self._unpacked(name, base, self._packed.read)
        self._require_shape(name, found.shape, shape)
        return found

    def _unpacked(self, name: str, base: str, read: Callable[[Take], _Unpacked]) -> _Unpacked:
        def take(suffix: str) -> Tensor | None:
            path = self._files.get(base + suffix)
            return None if path is None else self._file(path).get_tensor(base + suffix)

        try:
            return read(take)
        except (ValueError, RuntimeError, SafetensorError) as error:
            raise UnsupportedModel(f"{self._folder} has a weight {name!r} that cannot be read: {error}") from error

    def take(
        self, name: str, shape: Shape | None = None, *, rows: Part | None = None, columns: Part | None = None
    ) -> Tensor:
        """Return the tensor called `name`, or some of its `rows` or `columns`; a packed one is read completely.

        `shape`: the required shape of the whole tensor; None: any.
        """
        if self._packed is not None and (base := self._packed_name(name)) is not None:
            values = self._unpacked(name, base, self._packed.values)
            self._require_shape(name, values.shape, shape)
            if rows is not None:
                values = values[rows.start : rows.stop].clone()  # a view would keep all rows in memory
            elif columns is not None:
                values = values[:, columns.start : columns.stop].clone()
            return values.to(device=self._device, dtype=self._dtype)
        path = self._files.get(name)
        if path is None:
            raise UnsupportedModel(f"{self._folder} has no tensor {name!r}: the checkpoint is incomplete")
        try:
            whole = self._file(path).get_slice(name)
        except SafetensorError as error:
            raise UnsupportedModel(
                f"{path} has no tensor {name!r}, though the index beside it says so: copy or fetch the model again"
            ) from error
        self._require_shape(name, whole.get_shape(), shape)
        tensor: Tensor
        if rows is not None:
            tensor = whole[rows.start : rows.stop]
        elif columns is not None:
            tensor = whole[:, columns.start : columns.stop]
        else:
            tensor = self._file(path).get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def _require_shape(self, name: str, found: Sequence[int], shape: Shape | None) -> None:
        if shape is not None and (*found,) != shape:
            raise UnsupportedModel(
                f"{self._folder} has a tensor {name!r} of shape {[*found]}, where its config.json says {[*shape]}: "
                "one of the files belongs to another model"
            )

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _opened(path)
        return self._open[path]

    def maybe(self, name: str, shape: Shape, *, rows: Part | None = None) -> Tensor | None:
        """Return what `take` does, or None if there is no such tensor, or a bias of zeros beside packed weights."""
        found = self.take(name, shape, rows=rows) if self.has(name) else None
        return None if self._packed is not None and found is not None and not found.any() else found


def has_safetensors(folder: Path) -> bool:
    """Return whether `folder` holds weights that `Weights` can read."""
    return any(folder.glob("*.safetensors"))


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModel(f"{path} is damaged or incomplete, copy or fetch it again: {error}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        files.update(dict.fromkeys(_opened(path).keys(), path))
    if not files:
        raise UnsupportedModel(f"{folder} has no *.safetensors: save the model with save_pretrained first")
    return files


@dataclass(frozen=True, slots=True)
class Projection:
    """`weight` [out, in] and `bias` [out] of a linear layer."""

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    """Factors of the rows of a weight in 8-bit floating point: [out] float32."""
    grouped: GroupedWeight | None = None
    """The weight as numbers, if the checkpoint has them: then `weight` is empty, [out, 0]."""

    @classmethod
    def of_numbers(cls, numbers: GroupedWeight, bias: Tensor | None) -> Projection:
        """Return a projection whose weight is given as numbers."""
        return cls(torch.empty(len(numbers.numbers), 0), bias, grouped=numbers)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer as in the checkpoint, except that projections of the same input are joined."""

    input_norm: Tensor
    qkv: Projection
    """q, k and v, joined along the outputs."""
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    """Gate and up, joined along the outputs."""
    down: Projection
    window: int | None


@dataclass(slots=True)
class LlamaWeights:
    """Weights of a model without its embedding. A stack takes layers out as it packs them, so none is held twice."""

    layers: list[LayerWeights]
    norm: Tensor
    head: Projection
    rope: RopeTable
    shape: HeadShape
    hidden: int
    intermediate: int
    eps: float
    tied: bool = False
    """Whether `head` is the embedding, which is kept unchanged."""
    mix: int = 1
    """Channels of the input of `down` that are mixed with each other before they are quantized (rotation.py)."""
    biased_mlp: bool = field(init=False)
    """Whether the MLPs have biases; also known after the layers have been taken out."""

    def __post_init__(self) -> None:
        self.biased_mlp = any(layer.gate_up.bias is not None for layer in self.layers)
