"""Cost of a padded batch: milliseconds as a constant plus an amount per cell, for models of other benchmarks."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SIZES = (1, 2, 4, 8, 16, 32)
LENGTHS = (8, 16, 32, 64, 128, 256)
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Fit:
    """ms = alpha + beta · (batch · longest), over batches of `SIZES` and `LENGTHS`."""

    dtype: str
    alpha: float
    """ms"""
    beta: float
    """ms for a cell of the padded batch"""
    error: float
    """Median of the relative errors."""

    @property
    def line(self) -> str:
        return (
            f"{self.dtype}: {self.alpha:.2f} ms + {self.beta:.5f} ms x (batch x longest), median error {self.error:.0%}"
        )


def fit(model: Path, dtype: str, threads: int, max_length: int) -> Fit:
    """Time the padded layout of the encoder and fit its cost."""
    from benchmarks.embedding.workers.encode import make_encoder

    encoder = make_encoder(
        {"model": str(model), "dtype": dtype, "threads": threads, "max_length": max_length, "setting": {}}, "padded"
    )
    cells, times = [], []
    for size in SIZES:
        for length in LENGTHS:
            batch = [[1 + (7 * row + at) % 1000 for at in range(length)] for row in range(size)]
            encoder.generate_batch(batch)
            took = []
            for _ in range(_REPEATS):
                began = time.perf_counter()
                encoder.generate_batch(batch)
                took.append(1e3 * (time.perf_counter() - began))
            cells.append(size * length)
            times.append(statistics.median(took))
    return fitted(dtype, cells, times)


def fitted(dtype: str, cells: list[int], times: list[float]) -> Fit:
    """Least squares of the relative errors, so that small batches count as much as large ones."""
    x, y = np.array(cells, float), np.array(times)
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(design, np.ones_like(y), rcond=None)
    errors = np.abs((alpha + beta * x) / y - 1)
    return Fit(dtype, float(alpha), float(beta), float(np.median(errors)))
