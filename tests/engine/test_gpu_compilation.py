"""The Triton kernels compile for GPUs that are not here: an interpreter takes what a compiler may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

_MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that a program can have, by compute capability."""


@pytest.mark.parametrize("cuts", ["ends", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile(capability: int, cuts: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.gpu_compilation", str(capability), cuts],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    expected = {
        "attend_tiles",
        "merge_partials",
        "add_rms_norm",
        "head_rms_norm",
        "silu_mul",
        "rope_and_store",
        "stream_product",
        "span_maxima",
        "row_maxima_of_spans",
    }
    assert {name for name, _ in kernels} == (expected | {"round_row"} if capability >= 89 else expected)
    assert all(int(shared) <= _MOST_SHARED[capability] for _, shared in kernels)
