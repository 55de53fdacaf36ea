"""Which systems there are, where their Python is and what it takes to see them at their best."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.throughput.process import ROOT, THIS_PYTHON

OURS, TRANSFORMERS, VLLM, PRODUCTS = "batchwright", "transformers", "vllm", "products"
PEERS = (VLLM, TRANSFORMERS)
DEFAULT_VLLM = ROOT / ".bench" / "vllm"

_THREADS = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True, slots=True)
class System:
    name: str
    python: Path = THIS_PYTHON
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"benchmarks.throughput.workers.{self.name}"


def vllm_systems(folder: Path, settings: Mapping[str, str]) -> list[System]:
    """vLLM in the virtual environment `folder`, in the ways worth trying; none where there is no vLLM.

    `settings` go before ours; with a thread binding among them, that is the one way.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        return []
    common = {"VLLM_LOGGING_LEVEL": "WARNING", **_preload(folder)}
    ways = [{}] if _THREADS in settings else _ways(sorted(os.sched_getaffinity(0)))
    return [System(VLLM, python, {**common, **way, **settings}) for way in ways]


def _ways(cores: list[int]) -> list[dict[str, str]]:
    """By itself vLLM keeps a core free for its scheduler, which waits in a busy loop: half of a machine with two.

    On all cores scheduler and computation get in each other's way; in one process they cannot, but it is not its
    default. Which is best depends on the machine.
    """
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(len(cores)), _THREADS: "nobind"}
    return [{_THREADS: "auto"}, {_THREADS: ",".join(map(str, cores))}, in_process]


def _preload(folder: Path) -> dict[str, str]:
    """Its documentation asks for Intel's OpenMP and for tcmalloc before everything else."""
    openmp = folder / "lib" / "libiomp5.so"
    libraries = [str(openmp)] if openmp.exists() else []
    libraries += [str(path) for path in sorted(folder.glob("lib/libtcmalloc*.so*"))[:1]]
    return {"LD_PRELOAD": ":".join(libraries)} if libraries else {}
