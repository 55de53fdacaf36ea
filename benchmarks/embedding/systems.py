"""The systems, the locations of their Python, and the settings that are tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.throughput.process import ROOT, THIS_PYTHON

OURS, BATCHER, SENTENCE, INFINITY = "encode", "batcher", "sentence_transformers", "infinity"
PEERS = (SENTENCE, INFINITY)
TITLES = {
    OURS: "batchwright",
    BATCHER: "batchwright, batcher",
    SENTENCE: "sentence-transformers",
    INFINITY: "infinity-emb",
}
_FOLDERS = {SENTENCE: "embed-st", INFINITY: "embed-infinity"}
_SIZES = (8, 16, 32, 64)
_WAYS: dict[str, list[dict[str, Any]]] = {
    SENTENCE: [{"batch_size": size} for size in _SIZES],
    INFINITY: [
        *({"batch_size": size, "bettertransformer": True} for size in _SIZES),
        {"batch_size": 16, "compile": True},
        {"batch_size": 32, "compile": True},
        {"batch_size": 16},
        {"batch_size": 32},
    ],
}


@dataclass(frozen=True, slots=True)
class System:
    """One system in one of its ways. Different ways compute the same vectors."""

    name: str
    python: Path = THIS_PYTHON
    setting: dict[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"benchmarks.embedding.workers.{self.name}"


def peer(name: str, folder: Path = ROOT / ".bench") -> list[System]:
    """The ways to try for one peer; none if its environment does not exist."""
    python = folder / _FOLDERS[name] / "bin" / "python"
    return [System(name, python, setting) for setting in _WAYS[name]] if python.exists() else []
