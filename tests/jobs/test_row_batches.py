"""Batches of rows of every format of Ray Data: the same rows are read, and the same kind comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import pandas as pd
import pyarrow as pa

from batchwright.errors import InputError
from batchwright.jobs.row_batches import row_batch

CELLS = st.one_of(st.none(), st.text(max_size=5), st.lists(st.text(max_size=3), max_size=3))
VECTOR = np.asarray([1.0, 2.0], np.float32)


def batches(columns: dict[str, list[Any]]) -> dict[str, Any]:
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), object)
        arrays[name][:] = values
    return {"numpy": arrays, "pandas": pd.DataFrame(arrays, index=range(3, 3 + len(next(iter(columns.values())))))}


@given(st.lists(st.tuples(CELLS, st.integers(-(2**63), 2**63 - 1)), max_size=6))
def test_rows_are_the_same_in_every_format(rows: list[tuple[object, int]]) -> None:
    columns: dict[str, list[Any]] = {"cell": [cell for cell, _ in rows], "n": [number for _, number in rows]}
    for batch in batches(columns).values():
        read = row_batch(batch)
        assert len(read) == len(rows)
        assert [tuple(row.values()) for row in read.rows(["cell", "n"])] == rows


def test_rows_of_arrow_are_those_of_arrays() -> None:
    messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "c"}]]
    table = pa.table({"messages": messages, "text": ["a", None], "vector": [[1, 2], [3, 4]]})
    read = row_batch(table)
    assert [*read.rows(["text", "vector"])] == [{"text": "a", "vector": [1, 2]}, {"text": None, "vector": [3, 4]}]
    [first, second] = read.rows(["messages"])
    assert first == {"messages": [{"role": "user", "content": "a", "name": None}]}
    assert second == {"messages": messages[1]}


def test_times_are_texts_and_matrices_are_lists() -> None:
    times = np.asarray(["2026-01-02T03:04:05"], "datetime64[ns]")
    read = row_batch({"at": times, "pixels": np.asarray([[1, 2]])})
    assert [*read.rows(["at", "pixels"])] == [{"at": "2026-01-02T03:04:05.000000000", "pixels": [1, 2]}]


ADDED: Any = {"said": ("text", ["x", None]), "all": ("texts", [["a", "b"], None]), "vector": ("vector", [VECTOR, None])}


def test_columns_are_added_to_arrays() -> None:
    made: Any = row_batch({"n": np.arange(2)}).with_columns(ADDED, 2)
    assert [*made] == ["n", "said", "all", "vector"]
    assert made["said"].tolist() == ["x", None]
    assert made["all"].tolist() == [["a", "b"], None]
    assert made["vector"].dtype == np.float32
    np.testing.assert_array_equal(made["vector"], [[1, 2], [np.nan, np.nan]])


def test_columns_are_added_to_frames() -> None:
    frame = pd.DataFrame({"n": [1, 2]}, index=[7, 9])
    made: Any = row_batch(frame).with_columns(ADDED, 2)
    assert [*frame.columns] == ["n"]
    assert [*made.index] == [7, 9]
    assert made["said"].dtype == "string"
    assert made["said"].isna().tolist() == made["vector"].isna().tolist() == [False, True]
    assert made["all"].tolist() == [["a", "b"], None]


@pytest.mark.parametrize("rows", [2, 0])
def test_types_of_arrow_do_not_depend_on_what_is_null(rows: int) -> None:
    added: Any = {name: (kind, [None] * rows) for name, (kind, _) in ADDED.items()}
    made: Any = row_batch(pa.table({"n": [1, 2][:rows]})).with_columns(added, 2)
    types = [pa.string(), pa.list_(pa.string()), pa.list_(pa.float32())]
    assert [made.schema.field(name).type for name in ADDED] == types


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(InputError, match="batch_format"):
        row_batch([{"text": "a"}])
