"""Kernels that are launched before the one ahead of them has ended, where a device can.

What such a kernel does before it waits must not depend on the kernel ahead, and neither may it write. A kernel that is
launched early must also let the next one be launched early only if no more programs of its own wait for a place.
"""

from __future__ import annotations

import torch

_CAPABILITY = (9, 0)


def launches_early(device: torch.device) -> bool:
    """Return whether kernels can be launched on `device` before the one ahead of them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


def early_launch(early: bool) -> dict[str, bool]:
    """Return the arguments of a Triton kernel that is launched early, or is not."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
