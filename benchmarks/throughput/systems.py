"""The systems, the locations of their Python, and what it takes to run them at their best."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from batchwright.engine.bodies.load import choose_dtype
from batchwright.errors import DownloadError
from batchwright.models import resolve
from benchmarks.throughput.checkpoints import quantized_checkpoint
from benchmarks.throughput.gguf_files import gguf_files
from benchmarks.throughput.process import ROOT, THIS_PYTHON
from benchmarks.throughput.workers.protocol import WITHOUT_ZENTORCH

OURS, PRODUCTS = "batchwright", "products"
VLLM, OPENVINO, LLAMA_CPP, TRANSFORMERS = "vllm", "openvino", "llama_cpp", "transformers"
PEERS = (VLLM, OPENVINO, LLAMA_CPP, TRANSFORMERS)
BENCH = ROOT / ".bench"
DEFAULT_VLLM = BENCH / "vllm"

_THREADS = "VLLM_CPU_OMP_THREADS_BIND"
_GGUF_FOLDERS = {OPENVINO: "openvino", LLAMA_CPP: "llama-cpp"}
_GGUF_PRECISIONS = {
    OPENVINO: {"bf16": {"F16": "F16"}, "int8": {"int8": "F16"}, "int4": {"int4": "F16"}},
    LLAMA_CPP: {"bf16": {"BF16": "BF16"}, "int8": {"Q8_0": "Q8_0"}, "int4": {"Q4_0": "Q4_0"}},
}
"""For each number of bits of ours, what theirs is called, and the file that it is computed from."""
_VLLM_BITS = {"int8": 8, "int4": 4}


class Unavailable(ValueError):
    """A peer cannot be measured; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class System:
    name: str
    python: Path = THIS_PYTHON
    environment: Mapping[str, str] = field(default_factory=dict)
    precision: str = "bf16"
    model: Path | None = None
    """What it reads instead of the folder in transformers format."""

    @property
    def module(self) -> str:
        return f"benchmarks.throughput.workers.{self.name}"


def peer_systems(
    name: str, model: str, vllm: Path, settings: Mapping[str, str], say: Callable[[str], None], *, bits: str
) -> list[System]:
    """The peer `name` in the ways worth trying, at least one. `vllm` and `settings` are of vLLM.

    `bits`: bf16, int8 or int4, as ours has. Raises `Unavailable` where it is not installed, or cannot read `model`.
    """
    if name == VLLM:
        if not (ways := vllm_systems(vllm, settings)):
            raise Unavailable(f"no vLLM in {vllm}: make it with benchmarks/setup_vllm.sh")
        return ways if bits == "bf16" else [*_quantized(ways, model, _VLLM_BITS[bits], say), *ways]
    return [System(TRANSFORMERS)] if name == TRANSFORMERS else gguf_systems(name, model, BENCH, say, bits=bits)


def _quantized(ways: list[System], model: str, bits: int, say: Callable[[str], None]) -> list[System]:
    """vLLM in the same ways with weights of 8 or 4 bits; none where no checkpoint can be made of `model`.

    Activations have 8 bits as well; with weights of 4, on processors without AMX, only if zentorch multiplies.
    """
    try:
        folder = resolve(model, progress=say, weights="values")
        checkpoint = quantized_checkpoint(folder, BENCH / "quantized", bits, say)
    except ValueError as error:
        say(f"vLLM runs in {ways[0].precision} only: {error}")
        return []
    return [replace(way, precision="W8A8" if bits == 8 else "int4", model=checkpoint) for way in ways]


def gguf_systems(name: str, model: str, folder: Path, say: Callable[[str], None], *, bits: str) -> list[System]:
    """OpenVINO or llama.cpp, installed in `folder`, with `model` in as many `bits` as ours: bf16, int8 or int4.

    Raises `Unavailable` where it is not installed, or `model` cannot be had as a GGUF file.
    """
    python = peer_python(name, folder)
    precisions = _GGUF_PRECISIONS[name][bits]
    try:
        files = gguf_files(model, set(precisions.values()), folder / "gguf", say)
    except DownloadError as error:
        raise Unavailable(str(error)) from error
    if not files:
        raise Unavailable(f"there is no GGUF file of {model}: give --model a file.gguf, or a built-in model")
    return [System(name, python, precision=way, model=files[file]) for way, file in precisions.items()]


def peer_python(name: str, folder: Path) -> Path:
    """The Python of OpenVINO or llama.cpp, installed in `folder`. Raises `Unavailable` where it is not."""
    python = folder / _GGUF_FOLDERS[name] / "bin" / "python"
    if not python.exists():
        raise Unavailable(f"it is not in {python.parents[1]}: make it with benchmarks/setup_{name}.sh")
    return python


def vllm_systems(folder: Path, settings: Mapping[str, str]) -> list[System]:
    """vLLM in the virtual environment `folder`, in the ways worth trying; none where there is no vLLM.

    `settings` override ours; if they set a thread binding, that is the only way.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        return []
    common = {"VLLM_LOGGING_LEVEL": "WARNING", **_preload(folder)}
    ways = [{}] if _THREADS in settings else _ways(sorted(os.sched_getaffinity(0)))
    if any(folder.glob("lib/python3*/site-packages/zentorch")):
        # vLLM takes it wherever it is installed. In one process, as is best on few cores.
        ways = [*({**way, WITHOUT_ZENTORCH: "1"} for way in ways), ways[-1]]
    precision = _vllm_precision()
    return [System(VLLM, python, {**common, **way, **settings}, precision) for way in ways]


def _vllm_precision() -> str:
    """bfloat16, or float32 on a processor that does not multiply it: there it is four times as fast."""
    return "bf16" if choose_dtype("auto", torch.device("cpu")) is torch.bfloat16 else "f32"


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
