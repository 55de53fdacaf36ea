"""Kernels that are launched before the one ahead of them has ended (programmatic dependent launch), where a device can.

Every program of such a kernel waits for the kernel ahead before it ends, also one with nothing to do: so what a kernel
has waited for includes all kernels before. What it does earlier depends on no kernel that may still run, and writes
nothing. The next kernel is launched when all programs of one have let it, so none of them is still to come.
"""

from __future__ import annotations

from functools import cache

import torch

_CAPABILITY = (9, 0)


@cache
def launches_early(device: torch.device) -> bool:
    """Return whether kernels can be launched on `device` before the one ahead of them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def early_launch(early: bool) -> dict[str, bool]:
    """Return the arguments of a Triton kernel that is launched early, or is not."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
