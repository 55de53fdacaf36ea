"""A model of a given shape with random weights: no network, and a few kilobytes of disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from batchwright.engine.bodies import load
from batchwright.engine.bodies.packed_checkpoints import PackedFormat
from batchwright.engine.bodies.weights import Part, Weights
from benchmarks.accelerator.shapes import Shape

_SEED = 0
_SPREAD = 0.02


class RandomWeights(Weights):
    """Creates the tensors of the folder's model on the device as they are requested: norms of ones, the rest normal."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, packed: PackedFormat | None = None
    ) -> None:
        assert packed is None, "these are values"
        super().__init__(folder, dtype, device)
        self._shapes = _tensor_shapes(load.read_config(folder))
        self._generator = torch.Generator(device).manual_seed(_SEED)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        rows: Part | None = None,
        columns: Part | None = None,
    ) -> Tensor:
        assert (rows, columns) == (None, None), "these are whole models"
        assert shape in (None, self._shapes[name]), "the config implies other shapes"
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(
            0.0, _SPREAD, generator=self._generator
        )


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """Make engines created inside the block take their weights from `RandomWeights`."""
    names = vars(load)
    genuine = names["Weights"]
    names["Weights"] = RandomWeights
    try:
        yield
    finally:
        names["Weights"] = genuine


def write_model(shape: Shape, folder: Path) -> None:
    """A model's folder whose config is that of `shape`. One norm stands for its weights, so that it counts as whole."""
    from transformers import LlamaConfig

    LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **shape.config).save_pretrained(folder)
    save_file({"model.norm.weight": torch.ones(shape.config["hidden_size"])}, folder / "model.safetensors")


def _tensor_shapes(config: Any) -> dict[str, torch.Size]:
    from transformers import AutoModelForCausalLM

    untyped: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = untyped.from_config(config)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
