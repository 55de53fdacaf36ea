"""Weights of a checkpoint in safetensors, read tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchwright.errors import UnsupportedModel


class Weights:
    """Tensors by name, cast and moved as they are taken, so that no second copy of a model is ever held.

    Raises `UnsupportedModel` when the folder has no safetensors, or lacks a tensor.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._open: dict[Path, Any] = {}
        self._files = _tensor_files(folder)

    def has(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str) -> Tensor:
        """The tensor called `name`."""
        try:
            path = self._files[name]
        except KeyError:
            raise UnsupportedModel(f"{self._folder} has no tensor {name!r}: the checkpoint is incomplete") from None
        if path not in self._open:
            self._open[path] = _opened(path)
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def maybe(self, name: str) -> Tensor | None:
        return self.take(name) if self.has(name) else None


def has_safetensors(folder: Path) -> bool:
    """Whether `folder` holds weights that `Weights` can read."""
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
