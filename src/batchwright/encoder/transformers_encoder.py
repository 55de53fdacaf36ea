"""Encoders of any kind by transformers' own code: padded, or packed with a block-diagonal mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchwright.encoder.layouts import Cells, padded
from batchwright.engine.pretrained import load_pretrained
from batchwright.errors import UnsupportedModel

_WINDOWS = ("sliding_window", "local_attention", "attention_window", "layer_types")
"""Config fields of models in which some layers see only a part of the sequence: one mask for all layers is wrong."""


class WrappedBody:
    """Encoder body of transformers. Raises `UnsupportedModel` if transformers cannot load the folder as an encoder."""

    name = "transformers"

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModel

        self._architecture = str((getattr(config, "architectures", None) or [config.model_type])[0])
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModel(f"{self._architecture} has a decoder beside its encoder")
        self._model, lacking = load_pretrained(AutoModel, folder, f"{self._architecture} as an encoder", dtype, device)
        # The pooler is not used; any other missing weight would be random.
        if missing := [name for name in lacking if not name.startswith("pooler.")]:
            raise UnsupportedModel(
                f"{folder} has no weights for {missing[0]} and {len(missing) - 1} others of its encoder"
            )
        self._device, self._dtype = device, dtype
        self.dim: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_positions = self.positions_of(config)
        self._windowed = next((name for name in _WINDOWS if getattr(config, name, None)), None)

    @staticmethod
    def positions_of(config: Any) -> int:
        """Return the `max_positions` of a body for `config`."""
        return getattr(config, "max_position_embeddings", None) or 2**20

    @property
    def description(self) -> str:
        """Names of the implementations that run."""
        return "transformers body"

    def forward(self, cells: Cells) -> Tensor:
        """Return the last hidden states -> [cells, dim], meaningless at padding."""
        inputs = self._packed(cells) if cells.width is None else self._padded(cells, cells.width)
        hidden: Tensor = self._model(**inputs).last_hidden_state
        return hidden.reshape(-1, self.dim)

    def require_packing(self, probe: Cells) -> None:
        """Compute `probe` packed and one by one. Raises `UnsupportedModel` if the results differ."""
        try:
            if self._windowed is not None:
                raise UnsupportedModel(f"{self._windowed} is set, and one mask does not serve all layers")
            together = self.forward(probe).float()
            sequences = np.split(probe.ids, probe.starts[1:])
            alone = torch.cat([self.forward(*padded([each], 0)).float() for each in sequences])
            error = float((together - alone).norm() / alone.norm())
            if not error < (1e-4 if self._dtype is torch.float32 else 0.1):
                raise UnsupportedModel(f"its packed output differs by {error:.2g} (relative norm)")
        except Exception as error:  # the model's code was not made for this; any error says so
            raise UnsupportedModel(
                f"{self._architecture} cannot compute sequences packed in one row ({error}): use layout='bucketed' or "
                "layout='padded'"
            ) from error

    def _padded(self, cells: Cells, width: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(cells.ids).view(-1, width)
        mask = torch.arange(width) < torch.from_numpy(cells.lengths)[:, None]
        return {"input_ids": ids.to(self._device), "attention_mask": mask.long().to(self._device)}

    def _packed(self, cells: Cells) -> dict[str, Tensor]:
        owner = torch.from_numpy(np.repeat(np.arange(len(cells.lengths)), cells.lengths)).to(self._device)
        mask = torch.zeros(len(owner), len(owner), dtype=self._dtype, device=self._device)
        mask.masked_fill_(owner[:, None] != owner, torch.finfo(self._dtype).min)
        return {
            "input_ids": torch.from_numpy(cells.ids)[None].to(self._device),
            "position_ids": torch.from_numpy(cells.positions)[None].to(self._device),
            "attention_mask": mask[None, None],
        }
