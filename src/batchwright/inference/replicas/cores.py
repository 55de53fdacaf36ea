"""Where replicas compute: one on each GPU or, on CPUs, one on each group of cores, none of which spans NUMA nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from batchwright.cpu_cores import Core, core_groups, cores_of, logical_processors
from batchwright.errors import InputError

ReplicaCount: TypeAlias = int | Literal["auto"]
"""Number of replicas; `"auto"`: one for each GPU, else one for each NUMA node."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True, slots=True)
class Place:
    """What one replica computes on."""

    cores: tuple[Core, ...] = ()
    """Empty: any."""
    gpu: str | None = None
    """Its name in CUDA_VISIBLE_DEVICES, several with tensor parallelism; None: no GPU."""

    @property
    def node(self) -> int | None:
        """NUMA node of its cores, which are all on one; None: they may be on any."""
        return self.cores[0].node if self.cores else None

    @property
    def cpus(self) -> tuple[int, ...] | None:
        return logical_processors(self.cores) or None


def parse_count(text: str | int) -> ReplicaCount:
    """Return the number of replicas in an option. Raises ValueError."""
    if text == "auto":
        return "auto"
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1 or isinstance(text, bool):
        raise ValueError(f"replicas={text!r}: must be a number of processes, at least 1, or auto")
    return number


def places_for(count: ReplicaCount, device: str, tensor_parallel: int = 1) -> list[Place]:
    """Return the places for `count` replicas on this machine, whose engines compute on `device`.

    Each has `tensor_parallel` GPUs; without GPUs, its engine divides its cores between the ranks. Raises `InputError`
    for more replicas than there are GPUs or cores.
    """
    if device.startswith("cuda:"):
        raise InputError(f"device={device!r} with replicas: each gets a GPU of its own; set {_VISIBLE} to choose some")
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise InputError("device='cuda': torch finds no CUDA device here; use device='cpu'")
    if gpus:
        number = max(1, len(gpus) // tensor_parallel) if count == "auto" else count
        if number * tensor_parallel > len(gpus):
            needed = (
                "a GPU of its own" if tensor_parallel == 1 else f"tensor_parallel={tensor_parallel} GPUs of its own"
            )
            raise InputError(f"replicas={number}: each needs {needed}, and {len(gpus)} can be used here")
        bounds = range(0, number * tensor_parallel, tensor_parallel)
        return [Place(gpu=",".join(gpus[first : first + tensor_parallel])) for first in bounds]
    cores = cores_of(os.sched_getaffinity(0))
    number = len({core.node for core in cores}) if count == "auto" else count
    return [Place(group) for group in core_groups(cores, number)]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that torch can use, as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(_VISIBLE)
    if named is None and not Path("/dev/nvidiactl").exists():
        return []
    # Asking torch in this process would allocate memory on the first GPU.
    try:
        done = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=True)
        number = int(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []
    names = [name.strip() for name in named.split(",")] if named else [str(index) for index in range(number)]
    return names[:number]
