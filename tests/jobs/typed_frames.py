"""What a user's script may rely on; checked by mypy with everything else, and run by `test_mapping`."""

from __future__ import annotations

from typing import assert_type

import pandas as pd
import polars as pl

import batchwright

from .fakes import fake


def answered() -> tuple[pd.DataFrame, pl.DataFrame]:
    """Frames of two libraries, answered."""
    engine = fake()
    table = batchwright.map(pd.DataFrame({"text": ["x"]}), prompt="{text}", model=engine)
    assert_type(table, pd.DataFrame)
    frame = batchwright.map(pl.DataFrame({"text": ["x"]}), prompt="{text}", model=engine, errors="raise")
    assert_type(frame, pl.DataFrame)
    return table, frame


def mistaken(frame: pl.DataFrame) -> None:
    """Arguments that mypy refuses."""
    batchwright.map(frame, prompt="{text}", errors="ignore")  # type: ignore[arg-type]
    batchwright.map(frame, prompt=1)  # type: ignore[arg-type]
