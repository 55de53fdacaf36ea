"""Loading of models by transformers, without output on the user's terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from batchwright.errors import UnsupportedModel


def load_pretrained(
    kind: Any, folder: Path, wanted: str, dtype: torch.dtype, device: torch.device, **options: Any
) -> tuple[Any, list[str]]:
    """Return the model in `folder`, loaded by the auto class `kind`, and the sorted names of weights it lacks.

    Raises `UnsupportedModel` ("transformers cannot load `wanted`").
    """
    try:
        with _no_progress_bars():
            model, found = kind.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
            )
    except (ValueError, KeyError, ImportError, OSError, SafetensorError) as error:
        raise UnsupportedModel(f"transformers cannot load {wanted}: {error}") from error
    return model.to(device).eval(), sorted(found["missing_keys"])


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and its hub; afterwards both are shown or hidden as before."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    bars: Any = logging
    hub_shown = not are_progress_bars_disabled()
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()  # also the hub's; enabling also enables those
    try:
        yield
    finally:
        bars.enable_progress_bar()
        if not hub_shown:
            disable_progress_bars()
