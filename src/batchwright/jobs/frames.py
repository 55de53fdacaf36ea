"""Inputs that are in memory: data frames and lists of rows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchwright.errors import InputError
from batchwright.jobs.compression import pyarrow_for


@contextmanager
def as_files(data: Any) -> Iterator[tuple[str, ...]]:
    """The names of the files that `data` names, or of a Parquet file with its rows, for the duration of the block.

    `data`: a path, several paths, a frame of pandas, polars or Arrow, a mapping of columns, or a list of rows as
    mappings. Raises `InputError` for anything else.
    """
    if isinstance(data, (str, os.PathLike)):
        yield (os.fspath(data),)
    elif isinstance(data, Sequence) and data and all(isinstance(each, (str, os.PathLike)) for each in data):
        yield tuple(map(os.fspath, data))
    else:
        with tempfile.TemporaryDirectory(prefix="batchwright-") as folder:
            path = Path(folder) / "frame.parquet"
            _save(data, path)
            yield (str(path),)


def _save(data: Any, path: Path) -> None:
    pa = pyarrow_for("an input in memory")
    import pyarrow.parquet as pq

    try:
        table = pa.table(_columns_of(data) if isinstance(data, list) else data)
        pq.write_table(table, path)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"input of type {type(data).__name__}: give a path, several, a data frame or a list of rows ({error})"
        ) from error


def _columns_of(rows: list[Any]) -> dict[str, list[Any]]:
    """The columns of `rows`, which may lack some of them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
