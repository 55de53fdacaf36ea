"""Where replicas compute: one on each GPU, or on CPUs one on each group of cores, none of which spans NUMA nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from batchwright.errors import InputError

ReplicaCount: TypeAlias = int | Literal["auto"]
"""Number of replicas; `"auto"`: one for each GPU, else one for each NUMA node."""

_T = TypeVar("_T")

_SYS = Path("/sys/devices/system/cpu")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True, slots=True)
class Core:
    """A core, with the logical processors that share it."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """What one replica computes on."""

    cores: tuple[Core, ...] = ()
    """Empty: any."""
    gpu: str | None = None
    """Its name in CUDA_VISIBLE_DEVICES; None: no GPU."""

    @property
    def cpus(self) -> tuple[int, ...] | None:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus)) or None


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


def places_for(count: ReplicaCount, device: str) -> list[Place]:
    """Return the places of `count` replicas on this machine, whose engines compute on `device`.

    Raises `InputError` for more replicas than there are GPUs or cores.
    """
    if device.startswith("cuda:"):
        raise InputError(f"device={device!r} with replicas: each gets a GPU of its own; set {_VISIBLE} to choose some")
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise InputError("device='cuda': torch finds no CUDA device here; use device='cpu'")
    if gpus:
        number = len(gpus) if count == "auto" else count
        if number > len(gpus):
            raise InputError(f"replicas={number}: each needs a GPU of its own, and {len(gpus)} can be used here")
        return [Place(gpu=gpu) for gpu in gpus[:number]]
    cores = cores_of(os.sched_getaffinity(0))
    number = len({core.node for core in cores}) if count == "auto" else count
    return [Place(group) for group in core_groups(cores, number)]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that torch can use, as they stand in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get(_VISIBLE)
    if named is None and not Path("/dev/nvidiactl").exists():
        return []
    # Whoever asks torch in this process gets an allocation on the first GPU with it.
    try:
        told = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=True)
        number = int(told.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []
    names = [name.strip() for name in named.split(",")] if named else [str(index) for index in range(number)]
    return names[:number]


def cores_of(cpus: Collection[int], sys_folder: Path = _SYS) -> list[Core]:
    """Return the cores of logical processors, by node; a processor of which the system tells nothing is one itself."""
    cores: dict[tuple[int, object], list[int]] = {}
    for cpu in sorted(cpus):
        folder = sys_folder / f"cpu{cpu}"
        node = next((int(each.name[4:]) for each in sorted(folder.glob("node[0-9]*"))), 0)
        try:
            siblings: object = (folder / "topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = cpu
        cores.setdefault((node, siblings), []).append(cpu)
    return sorted(
        (Core(node, tuple(each)) for (node, _), each in cores.items()), key=lambda core: (core.node, core.cpus)
    )


def core_groups(cores: Sequence[Core], number: int) -> list[tuple[Core, ...]]:
    """Return `number` groups of about the same size; none spans nodes that others need not share with it.

    Raises `InputError` for more groups than cores.
    """
    if number > len(cores):
        raise InputError(f"replicas={number}: each needs a core of its own, and {len(cores)} can be used here")
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    if number <= len(nodes):
        parts = _split(list(nodes.values()), number)
        return [tuple(core for node in part for core in node) for part in parts]
    groups_of = dict.fromkeys(nodes, 1)
    for _ in range(number - len(nodes)):
        # The node whose groups are largest.
        most = max(nodes, key=lambda node: len(nodes[node]) / groups_of[node])
        groups_of[most] += 1
    return [tuple(part) for node, each in nodes.items() for part in _split(each, groups_of[node])]


def _split(items: Sequence[_T], number: int) -> list[Sequence[_T]]:
    bounds = [len(items) * index // number for index in range(number + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
