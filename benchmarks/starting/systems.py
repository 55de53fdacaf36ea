"""The commands that are compared, as a user types them."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from batchwright.models import cache_dir
from benchmarks.throughput.process import THIS_PYTHON
from benchmarks.throughput.systems import vllm_systems

INPUT, OUTPUT = "{input}", "{output}"
"""Stand for the two files in `System.arguments`."""


@dataclass(frozen=True, slots=True)
class System:
    """One way to answer a file of OpenAI batch lines."""

    name: str
    note: str
    """Its version, and what a reader must know about how it runs."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    compiled_in: Callable[[Path], dict[str, str]] | None = None
    """Environment that makes it keep what it compiles in this folder; None if it compiles nothing."""

    def command(self, source: Path, target: Path) -> list[str]:
        """Answers the lines of `source` into `target`."""
        files = {INPUT: str(source), OUTPUT: str(target)}
        return [files.get(argument, argument) for argument in self.arguments]


def ours(model: str, kv_gib: int) -> System:
    """The installed command."""
    command = str(THIS_PYTHON.with_name("batchwright"))
    arguments = (command, "run", INPUT, "-o", OUTPUT, "--model", model, "--kv-memory", f"{kv_gib}GiB", "--quiet")
    return System("batchwright", f"{_version('batchwright')}: `batchwright run`", arguments, compiled_in=_kernels_in)


def transformers(folder: Path) -> System:
    """A script with `generate` over one padded batch."""
    arguments = (str(THIS_PYTHON), "-m", "benchmarks.starting.transformers_batch", str(folder), INPUT, OUTPUT)
    note = f"{_version('transformers')}: a script, `generate` over one padded batch, bfloat16"
    return System("transformers", note, arguments, {"HF_HUB_OFFLINE": "1"})


def vllm(folder: Path, model: Path, served: str, kv_gib: int, settings: Mapping[str, str]) -> list[System]:
    """Its own batch runner in the environment `folder`, compiled and not; nothing where there is no vLLM.

    `served` is the name of the model in the lines; `settings` override our choice of its environment.
    """
    ways = vllm_systems(folder, settings)
    if not ways:
        return []
    environment = {"HF_HUB_OFFLINE": "1", **ways[0].environment}
    # What the command `vllm run-batch` runs. The command itself looks for a package of that name and fails, since the
    # wheel for the CPU has another.
    arguments = (
        *(str(ways[0].python), "-m", "vllm.entrypoints.launchers.run_batch", "-i", INPUT, "-o", OUTPUT),
        *("--model", str(model), "--served-model-name", served, "--dtype", "bfloat16"),
        *("--kv-cache-memory-bytes", str(kv_gib * 2**30)),
    )
    version = _version_in(ways[0].python)
    return [
        System("vLLM", f"{version}: `vllm run-batch`, compiled, bfloat16", arguments, environment, _graphs_in),
        System(
            "vLLM, eager",
            f"{version}: `vllm run-batch --enforce-eager`, bfloat16",
            (*arguments, "--enforce-eager"),
            environment,
        ),
    ]


def _kernels_in(folder: Path) -> dict[str, str]:
    (folder / "models").symlink_to(cache_dir() / "models")
    return {"BATCHWRIGHT_CACHE": str(folder)}


def _graphs_in(folder: Path) -> dict[str, str]:
    return {"VLLM_CACHE_ROOT": str(folder)}


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _version_in(python: Path) -> str:
    ask = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
