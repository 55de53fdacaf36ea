"""Kernels that a wheel contains: a library for each level of x86-64, of which a processor uses the highest it has.

`deploy/wheel/make_wheel.py` compiles them. They run on any processor of their level, as fast as kernels compiled for
that processor: the code that takes the time is written for the instructions of its level, whatever the compiler tunes
for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "shipped"
"""Folder of a wheel's libraries; it does not exist if kernels are compiled here."""

_V2 = frozenset(("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"))
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@dataclass(frozen=True, slots=True)
class Level:
    """Instruction set of processors that run the same library."""

    name: str
    options: tuple[str, ...]
    """Options of the compiler."""
    features: frozenset[str]
    """Features that `options` enable, by their names in /proc/cpuinfo."""


LEVELS = (
    Level(
        "avx512-bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        _V4 | {"avx512_vnni", "avx512_bf16"},
    ),
    Level("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    Level("avx512", ("-march=x86-64-v4",), _V4),
    Level("avx2", ("-march=x86-64-v3",), _V3),
)
"""The highest first."""
USED = frozenset(("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512_vnni", "avx512_bf16"))
"""Features that the sources test for."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """The library of a level."""

    path: Path
    complete: bool
    """Whether it uses every feature that the processor has and the sources can use."""


def shipped_library(name: str, processor: str) -> Shipped | None:
    """Return the best shipped library called `name` for a processor with these lines in /proc/cpuinfo, if any."""
    features = _features(processor)
    for level in LEVELS:
        path = shipped_path(FOLDER, name, level)
        if level.features <= features and path.exists():
            return Shipped(path, complete=features & USED <= level.features)
    return None


def shipped_path(folder: Path, name: str, level: Level) -> Path:
    """Return the path in `folder` of the library called `name` for `level`."""
    return folder / f"{name}-{level.name}.so"


def _features(processor: str) -> frozenset[str]:
    """Return the features that all processors of the machine have."""
    of_each = [frozenset(line.split(":", 1)[1].split()) for line in processor.splitlines() if line.startswith("flags")]
    return frozenset.intersection(*of_each) if of_each else frozenset()
