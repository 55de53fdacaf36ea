"""Kernels that are used only if they agree with torch on the device at hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def kernels_or(
    plain: _T,
    doing_without: str,
    device: torch.device,
    load: Callable[[], _T],
    disagreement: Callable[[_T], str | None],
) -> _T:
    """Return what `load` returns if it has no `disagreement` with torch on `device`; else `plain`.

    In that case the reason is logged as a warning that begins with `doing_without`. `load` and `disagreement` may raise
    anything.
    """
    try:
        kernels = load()
        reason = disagreement(kernels)
    except Exception as error:  # from an import, a compiler or a driver: whatever it is, torch computes the same
        reason = f"{type(error).__name__}: {error}"
    else:
        if reason is None:
            return kernels
    _log.warning("%s on %s: %s", doing_without, device, reason)
    return plain
