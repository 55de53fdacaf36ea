"""Loading a model without a word on the user's terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers shows none meanwhile; what the program had chosen for it and for the hub holds again afterwards."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    bars: Any = logging
    hub_shown = not are_progress_bars_disabled()
    if not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()  # the hub's too; enabling enables them too
    try:
        yield
    finally:
        bars.enable_progress_bar()
        if not hub_shown:
            disable_progress_bars()
