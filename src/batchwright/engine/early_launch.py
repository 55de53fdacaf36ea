"""Kernels that are launched before the one ahead of them has ended (programmatic dependent launch), where a device can.

Every program of such a kernel, even one with nothing to do, waits for the kernel ahead before it ends: a kernel that
has waited has thus waited for all kernels before it. What it does before waiting depends on no kernel that may still
run, and writes nothing. The next kernel is launched when all programs of one have permitted it, so none of them has yet
to start.
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
    """Return the launch arguments of a Triton kernel, depending on whether it is launched early."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
