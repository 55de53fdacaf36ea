"""A quick build, in a module that loads no kernels: a process that runs it compiles nothing else."""

from __future__ import annotations

from batchwright.engine.native.build import SOURCES, library_path

QUICKEST = next(source for source in SOURCES if source.stem == "elementwise")
"""To compile."""


def build() -> str:
    """Return the path of the library."""
    return str(library_path("quickest", (QUICKEST,)))
