"""torch's process group of the ranks, all on this machine."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

PATIENCE = 120.0
"""Seconds that a rank waits in a sum for the others, which compute the same step, before it gives up."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def require_no_group(ranks: int) -> None:
    """Raise ValueError if this process is in a group already: torch has one default group per process."""
    if dist.is_initialized():
        raise ValueError(
            f"tensor_parallel={ranks}: torch.distributed is in use in this process already; close the engine that uses "
            "it, or compute in a process of its own (replicas=1)"
        )


def join_group(meeting: Path, rank: int, ranks: int, device: torch.device) -> None:
    """Make the ranks that meet at this file torch's default process group: NCCL on GPUs, else gloo on loopback."""
    for name in _INTERFACES:
        os.environ.setdefault(name, "lo")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        device_id=device if on_gpu else None,
        init_method=meeting.as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE),
    )
