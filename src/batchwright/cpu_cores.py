"""The cores of this machine, and their division into groups that do not span NUMA nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from batchwright.errors import InputError

_T = TypeVar("_T")

_SYS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Core:
    """A core, with the logical processors that share it."""

    node: int
    cpus: tuple[int, ...]


def cores_of(cpus: Collection[int], sys_folder: Path = _SYS) -> list[Core]:
    """Return the cores of logical processors, by node; a processor that the system does not describe is one itself."""
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


def core_groups(cores: Sequence[Core], number: int, *, option: str = "replicas") -> list[tuple[Core, ...]]:
    """Return `number` groups of about the same size; none spans nodes unless there are fewer groups than nodes.

    Raises `InputError`, which names the `option`, for more groups than cores.
    """
    if number > len(cores):
        raise InputError(f"{option}={number}: each needs a core of its own, and {len(cores)} can be used here")
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


def logical_processors(cores: Collection[Core]) -> tuple[int, ...]:
    """Return all logical processors of `cores`."""
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def _split(items: Sequence[_T], number: int) -> list[Sequence[_T]]:
    bounds = [len(items) * index // number for index in range(number + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
