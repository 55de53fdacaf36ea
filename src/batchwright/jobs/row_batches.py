"""Batches of rows as Ray Data hands them out: arrays of numpy by column, frames of pandas, tables of Arrow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from batchwright.errors import InputError
from batchwright.jobs.mapping import plain

ColumnKind: TypeAlias = Literal["text", "texts", "vector"]
_TIMES = "mM"
"""Kinds of numpy arrays whose raw values are not what they mean."""


class RowBatch(Protocol):
    """A batch of one kind, to which columns are added."""

    columns: Sequence[str]

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    @abstractmethod
    def values(self, column: str) -> Iterable[object]:
        """The values of a column."""

    @abstractmethod
    def with_columns(self, added: Mapping[str, tuple[ColumnKind, Sequence[Any]]], dim: int) -> object:
        """A batch of the same kind with further columns, by name; vectors have `dim` values.

        The type of a column is the same for all batches, whichever values are None in this one, if its kind has types.
        """

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, object]]:
        """The rows, with these columns, as JSON values."""
        found = [self.values(column) for column in columns]
        for row in zip(*found, strict=True):
            yield {name: plain(value) for name, value in zip(columns, row, strict=True)}


class _NumpyBatch(RowBatch):
    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch = batch
        self.columns = [*batch]

    def __len__(self) -> int:
        return len(next(iter(self._batch.values()), ()))

    def values(self, column: str) -> Iterable[object]:
        values = np.asarray(self._batch[column])
        return cast("Iterable[object]", values.astype(str) if values.dtype.kind in _TIMES else values)

    def with_columns(self, added: Mapping[str, tuple[ColumnKind, Sequence[Any]]], dim: int) -> object:
        made = {
            name: _matrix(values, dim) if kind == "vector" else _objects(values)
            for name, (kind, values) in added.items()
        }
        return {**self._batch, **made}


class _PandasBatch(RowBatch):
    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.columns = [*frame.columns]

    def __len__(self) -> int:
        return len(self._frame)

    def values(self, column: str) -> Iterable[object]:
        return cast("Iterable[object]", self._frame[column])

    def with_columns(self, added: Mapping[str, tuple[ColumnKind, Sequence[Any]]], dim: int) -> object:
        import pandas as pd

        types = {"text": "string", "texts": "object", "vector": "object"}
        index = self._frame.index
        return self._frame.assign(
            **{name: pd.Series([*values], index, dtype=types[kind]) for name, (kind, values) in added.items()}
        )


class _ArrowBatch(RowBatch):
    def __init__(self, table: Any) -> None:
        self._table = table
        self.columns = table.column_names

    def __len__(self) -> int:
        return cast("int", self._table.num_rows)

    def values(self, column: str) -> Iterable[object]:
        return cast("Iterable[object]", self._table[column].to_pylist())

    def with_columns(self, added: Mapping[str, tuple[ColumnKind, Sequence[Any]]], dim: int) -> object:
        import pyarrow as pa

        types = {"text": pa.string(), "texts": pa.list_(pa.string()), "vector": pa.list_(pa.float32())}
        table = self._table
        for name, (kind, values) in added.items():
            table = table.append_column(name, pa.array([*values], types[kind]))
        return table


def row_batch(batch: object) -> RowBatch:
    """The batch with an interface that does not depend on its kind. Raises `InputError` for anything else."""
    if isinstance(batch, Mapping):
        return _NumpyBatch(batch)
    kinds = {("pandas", "DataFrame"): _PandasBatch, ("pyarrow", "Table"): _ArrowBatch}
    made = kinds.get((type(batch).__module__.partition(".")[0], type(batch).__name__))
    if made is None:
        raise InputError(
            f"batch of type {type(batch).__name__}: choose batch_format='numpy', 'pandas' or 'pyarrow' in map_batches"
        )
    return made(batch)


def _objects(values: Sequence[object]) -> npt.NDArray[np.object_]:
    array = np.empty(len(values), np.object_)
    array[:] = [*values]
    return array


def _matrix(vectors: Sequence[npt.NDArray[np.float32] | None], dim: int) -> npt.NDArray[np.float32]:
    """The vectors as one array, for a column of tensors; a row without a vector is NaN: arrays have no null."""
    matrix = np.full((len(vectors), dim), np.nan, np.float32)
    for row, vector in zip(matrix, vectors, strict=True):
        if vector is not None:
            row[:] = vector
    return matrix
